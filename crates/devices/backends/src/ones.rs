//! `ones:SIZE`: every byte is 0xff, or another one.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, Kind, Op, Pending, Reply, Request, Result,
};
use blockhaul_catalog::{Backend, Opened, Opening, Param, ParamKind, Target};

use crate::{fill, operand};

/// The backend `ones:SIZE`.
pub struct Ones;

impl Backend for Ones {
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

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(std::future::ready(open(&target)))
    }
}

fn open(target: &Target) -> Result<Opened> {
    operand::source_only(target)?;
    let size = operand::size(target)?;
    let byte = target.args.number("byte").unwrap_or(255);
    let byte = u8::try_from(byte)
        .map_err(|_| Error::new(Kind::Usage, format!("ones: byte={byte} is more than 255")))?;
    Ok(computed(target, size, move |_, out| out.fill(byte)))
}

/// A read-only device of data whose bytes are computed: `fill(offset, piece)`.
pub(crate) fn computed(
    target: &Target,
    size: u64,
    fill: impl Fn(u64, &mut [u8]) + Clone + Send + Sync + 'static,
) -> Opened {
    let facts = Facts {
        can: Can::CACHE | Can::EXTENTS | Can::FLUSH | Can::MULTI_CONN,
        contexts: vec![BASE_ALLOCATION.to_string()],
        ..Facts::new(operand::name(target), size)
    };
    Opened::from(Arc::new(Computed { facts: Arc::new(facts), fill }) as Arc<dyn Device>)
}

struct Computed<F> {
    facts: Arc<Facts>,
    fill: F,
}

impl<F: Fn(u64, &mut [u8]) + Clone + Send + Sync + 'static> Device for Computed<F> {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        match request.op {
            Op::Read(room) => fill::read(request.at, room, self.fill.clone()),
            Op::Extents(contexts) => {
                let lists = contexts.iter().map(|_| Extents::one(request.len, 0)).collect();
                Pending::ready(Ok(Reply::Extents(lists)))
            }
            Op::Write(_) | Op::Zero | Op::Trim => {
                Error::new(Kind::ReadOnly, "computed bytes cannot be written").into()
            }
            Op::Flush | Op::Cache => Pending::ready(Ok(Reply::Done)),
        }
    }
}
