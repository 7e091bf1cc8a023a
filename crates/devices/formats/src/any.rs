//! `image:DEVICE`: the disk in an image whose first bytes tell its format.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, ImageFormat, OpenFuture, OpenedDevice, Param, ParamKind,
};

use crate::named::{ChainFile, folder_of};
use crate::storage::{len_of, read};

/// The backend `image:DEVICE`.
pub struct AnyImage;

impl Backend for AnyImage {
    fn schemes(&self) -> &'static [&'static str] {
        &["image"]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "the disk in an image of a format that its first bytes tell, or DEVICE itself if they tell none; read-only. \
         DEVICE is a path, or any device, where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M disk.raw && blockhaul copy disk.raw qcow2:disk.qcow2
blockhaul copy image:disk.qcow2 restored.raw
cmp disk.raw restored.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        &[Param {
            name: "names",
            kind: ParamKind::Choice(&["allow", "refuse"]),
            default: None,
            doc: "Whether to open the files that the image names. Whoever can write the image chooses the \
                  names: allow it only for images that you trust. If not given, the command decides.",
        }]
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(open(target))
    }
}

async fn open(target: BackendTarget) -> Result<OpenedDevice> {
    if target.intent.write || target.intent.target_size.is_some() {
        let text = "image: only reads: name the format to write, as in qcow2:DEVICE";
        return Err(Error::new(Kind::Usage, text));
    }
    let description = target.text()?.to_string();
    if description.is_empty() {
        return Err(Error::new(Kind::Usage, "requires a device: image:PATH"));
    }
    let opened = target.context.open(&description, target.intent).await?;
    let file = ChainFile::new(opened);
    let len = len_of(&file.device.facts()).min(ImageFormat::HEAD as u64);
    let head = read(&file.device, 0, len).await?;
    let Some(format) = ImageFormat::of_head(&head) else { return Ok(file.opened()) };
    let scheme = format.scheme;
    let names = match target.args.text("names") {
        Some(names) if format.names_files => format!("?names={names}"),
        _ => String::new(),
    };
    if folder_of(&description).is_some() {
        // Names in the image may begin there.
        drop(file);
        let place = description.replace('%', "%25").replace('?', "%3f");
        return target.context.open(&format!("{scheme}:{place}{names}"), target.intent).await;
    }
    // The connection that is there: a server may have room for one, or end with its last client.
    let context = target.context.with_backend(held(file.opened()));
    context.open(&format!("{scheme}:{HELD}:{names}"), target.intent).await
}

/// The scheme of a device that is open.
pub const HELD: &str = "held";

/// A kind of storage, `held:`, that gives a device which is open already, to all who open it: for
/// images whose device can be opened once, as an export of a server that has room for one client.
pub fn held(opened: OpenedDevice) -> Arc<dyn Backend> {
    Arc::new(OpenBackendDevice(opened))
}

struct OpenBackendDevice(OpenedDevice);

impl Backend for OpenBackendDevice {
    fn schemes(&self) -> &'static [&'static str] {
        &[HELD]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "a device that is open already"
    }

    fn open(&self, _: BackendTarget) -> OpenFuture<OpenedDevice> {
        let opened = OpenedDevice { device: self.0.device.clone(), more: self.0.more.clone() };
        Box::pin(std::future::ready(Ok(opened)))
    }
}
