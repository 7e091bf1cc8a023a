//! `ones:SIZE`: every byte is 0xff, or another one.

use blockhaul_backends::support::computed::computed;
use blockhaul_backends::support::operand;
use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};

/// The backend `ones:SIZE`.
pub struct OnesBackend;

impl Backend for OnesBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["ones"]
    }

    fn operand(&self) -> &'static str {
        "SIZE"
    }

    fn summary(&self) -> &'static str {
        "the same byte everywhere, read-only"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy 'ones:1M?byte=0x5a' - | od -A d -t x1
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[Param {
                name: "byte",
                kind: ParamKind::Number,
                default: Some("255"),
                doc: "The byte, 0 to 255, or 0x00 to 0xff.",
            }]
        }
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(std::future::ready(open(&target)))
    }
}

fn open(target: &BackendTarget) -> Result<OpenedDevice> {
    operand::source_only(target)?;
    let size = operand::size(target)?;
    let byte = target.args.number("byte").unwrap_or(255);
    let byte = u8::try_from(byte)
        .map_err(|_| Error::new(Kind::Usage, format!("ones: byte={byte} is more than 255")))?;
    Ok(computed(target, size, move |_, out| out.fill(byte)))
}
