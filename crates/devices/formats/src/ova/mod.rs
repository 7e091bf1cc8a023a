//! `ova:FILE`: a disk of a virtual machine in an OVA, a tar archive with a description of the machine.
//!
//! - `ovf`: the description.
//! - `manifest`: digests of the files.

mod manifest;
mod ovf;

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, HandleOpener, ImageFormat, Intent, Layer, OpenContext,
    OpenFuture, OpenedDevice, Param, ParamKind, Registry, Stack, format_size, percent_decode,
};
use blockhaul_layers::{ArchiveMember, ArchiveReader, MemberKind};

use self::manifest::OvaManifest;
use self::ovf::OvfDisk;
use crate::any::{HELD, held};
use crate::storage::len_of;

/// The scheme of the disks.
const SCHEME: &str = "ova";
/// Longest description or manifest in bytes.
const DESCRIPTION_MAX: u64 = 4 << 20;
/// Maximum number of members that are kept.
const MEMBERS_MAX: usize = 10_000;

/// The backend `ova:FILE`.
pub struct OvaBackend;

impl Backend for OvaBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &[SCHEME]
    }

    fn operand(&self) -> &'static str {
        "DEVICE"
    }

    fn summary(&self) -> &'static str {
        "a disk of a virtual machine in an OVA, read-only. DEVICE is the path of the OVA, or any device that holds it, \
         where %3f is a question mark and %25 a percent sign"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy sample:8M disk.raw
qemu-img convert -O vmdk -o subformat=streamOptimized disk.raw vm-disk1.vmdk
cat > vm.ovf <<END
<Envelope><References><File id="f" href="vm-disk1.vmdk"/></References>
<DiskSection><Disk diskId="d" fileRef="f"/></DiskSection></Envelope>
END
tar cf vm.ova vm.ovf vm-disk1.vmdk
blockhaul copy ova:vm.ova restored.raw && cmp disk.raw restored.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        &[
            Param {
                name: "disk",
                kind: ParamKind::Text,
                default: None,
                doc: "Number of the disk, from 1 on, in the order of the OVF description; needed if there are several. \
                      In copy also all: in the name of the target, {} is the number then.",
            },
            Param {
                name: "manifest",
                kind: ParamKind::Choice(&["check", "ignore"]),
                default: Some("check"),
                doc: "Whether to read the file of the disk first, and compare its digest with that in the manifest \
                      (NAME.mf), if the archive has one.",
            },
        ]
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(open(target))
    }
}

async fn open(target: BackendTarget) -> Result<OpenedDevice> {
    if target.intent.write || target.intent.target_size.is_some() {
        let text = "ova: an OVA is read-only: copy its disk to a file first";
        return Err(Error::new(Kind::Usage, text));
    }
    let description = target.text()?.to_string();
    if description.is_empty() {
        return Err(Error::new(Kind::Usage, "requires a device: ova:PATH"));
    }
    let spec = DeviceSpec::parse(description.as_ref())?;
    let intent = Intent { direct: target.intent.direct, ..Intent::READ_IMAGE };
    let registry = target.context.registry();
    let archive = registry.open(&spec, Vec::new(), intent).await?;
    let contents = OvaContents::read(archive.device()).await?;
    let disk = contents.disk(target.args.text("disk").map(number).transpose()?)?;
    if target.args.text("manifest") != Some("ignore") {
        contents.check(archive.device(), disk).await?;
    }
    drop(archive);
    let layers = disk.layers(registry)?;
    let stack = registry.open(&spec, layers, intent).await?;
    disk_in(&target.context, stack, intent).await
}

fn number(text: &str) -> Result<u64> {
    let wrong = match text {
        ALL => "ova: disk=all is for blockhaul copy, and for the source of a job file",
        _ => "ova: disk: requires the number of a disk, from 1 on",
    };
    text.parse().map_err(|_| Error::new(Kind::Usage, wrong))
}

/// The disk in an image that a stack shows; the device of the stack if it is no image.
async fn disk_in(context: &OpenContext, stack: Stack, intent: Intent) -> Result<OpenedDevice> {
    let device = stack.device().clone();
    let len = len_of(&device.facts()).min(ImageFormat::HEAD as u64);
    let head = crate::storage::read(&device, 0, len).await?;
    let more = stack.has_more().then(|| Arc::new(StackHandles(stack)) as Arc<dyn HandleOpener>);
    let opened = OpenedDevice { device, more };
    let Some(format) = ImageFormat::of_head(&head) else { return Ok(opened) };
    // Whoever wrote the archive chooses the names in its images.
    let names = if format.names_files { "?names=refuse" } else { "" };
    let context = context.with_backend(held(opened));
    context.open(&format!("{}:{HELD}:{names}", format.scheme), intent).await
}

/// Further handles of a stack.
struct StackHandles(Stack);

impl HandleOpener for StackHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let stack = self.0.clone();
        Box::pin(async move { stack.another().await })
    }
}

/// The disks of an OVA.
struct OvaContents {
    name: String,
    disks: Vec<OvaDisk>,
    description: ArchiveMember,
    manifest: Option<ArchiveMember>,
}

/// A disk with the place of its file.
struct OvaDisk {
    disk: OvfDisk,
    member: ArchiveMember,
}

/// The value of the option `disk` that stands for all disks.
const ALL: &str = "all";

/// All disks of an OVA: `ova:DEVICE?disk=all`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OvaDisks {
    /// The device, as it was typed.
    place: String,
    /// The other options.
    options: String,
}

impl OvaDisks {
    /// The disks that a description stands for; `None` if it stands for one device.
    pub fn of(spec: &DeviceSpec) -> Option<OvaDisks> {
        let DeviceSpec::Scheme { scheme, rest } = spec else { return None };
        let (place, options) = rest.split_once('?')?;
        let is_all = |option: &&str| option.strip_prefix("disk=") == Some(ALL);
        let has_all = scheme == SCHEME && options.split('&').any(|option| is_all(&option));
        let others = options.split('&').filter(|option| !is_all(option));
        let options = others.fold(String::new(), |all, option| all + "&" + option);
        has_all.then(|| OvaDisks { place: place.to_string(), options })
    }

    /// The device that holds the archive.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the description is invalid.
    pub fn archive(&self) -> Result<DeviceSpec> {
        DeviceSpec::parse(percent_decode(&self.place)?.as_ref())
    }

    /// The disk of this number, from 1 on.
    pub fn disk(&self, number: usize) -> DeviceSpec {
        let rest = format!("{}?disk={number}{}", self.place, self.options);
        DeviceSpec::Scheme { scheme: SCHEME.into(), rest }
    }

    /// The number of disks with data in the archive on a device, at least 1.
    ///
    /// # Errors
    /// Those of opening the disks; [`Kind::NotFound`] if there is none.
    pub async fn count(archive: &Arc<dyn Device>) -> Result<usize> {
        let contents = OvaContents::read(archive).await?;
        match contents.disks.len() {
            0 => contents.disk(None).map(|_| 0),
            count => Ok(count),
        }
    }
}

impl OvaContents {
    async fn read(device: &Arc<dyn Device>) -> Result<OvaContents> {
        let facts = device.facts();
        let name = facts.name.to_string();
        let wrong = |kind, why: String| Error::new(kind, format!("ova: {name}: {why}"));
        let members = members(device)
            .await
            .map_err(|error| error.reworded(format!("ova: {}", error.text())))?;
        let Some(description) = members.iter().find(|member| is_file(member, b".ovf")) else {
            let text = "it has no OVF description (NAME.ovf): use the layer tar for a member of another archive";
            return Err(wrong(Kind::Invalid, text.into()));
        };
        let text = text_of(device, description).await.map_err(|why| wrong(Kind::Invalid, why))?;
        let found = ovf::disks(&text);
        let found =
            found.map_err(|why| wrong(Kind::Unsupported, format!("the OVF description: {why}")))?;
        let mut disks = Vec::new();
        for disk in found {
            let member = members.iter().find(|member| member.is_called(disk.file.as_bytes()));
            let Some(member) = member else {
                let text = format!(
                    "the file {:?} of disk {} is not in the archive",
                    disk.file,
                    disks.len() + 1
                );
                return Err(wrong(Kind::NotFound, text));
            };
            let end = member.offset.checked_add(member.len);
            if member.kind != MemberKind::File || end.is_none_or(|end| end > facts.size) {
                let text = format!(
                    "the file {:?} is not complete, or is stored as a sparse file",
                    disk.file
                );
                return Err(wrong(Kind::Unsupported, text));
            }
            disks.push(OvaDisk { disk, member: member.clone() });
        }
        let description = description.clone();
        let manifest = members.iter().find(|member| is_file(member, b".mf")).cloned();
        Ok(OvaContents { name, disks, description, manifest })
    }

    /// Compares the description and the file of a disk with their digests in the manifest, if there is one.
    async fn check(&self, device: &Arc<dyn Device>, disk: &OvaDisk) -> Result<()> {
        let Some(member) = &self.manifest else { return Ok(()) };
        let wrong = |why: String| Error::new(Kind::Invalid, format!("ova: {}: {why}", self.name));
        let text = text_of(device, member).await.map_err(wrong)?;
        let name = String::from_utf8_lossy(&member.name);
        let manifest = OvaManifest::parse(&name, &text).map_err(wrong)?;
        let named = |error: Error| error.reworded(format!("ova: {}: {}", self.name, error.text()));
        for file in [&self.description, &disk.member] {
            manifest.check(device, file).await.map_err(named)?;
        }
        Ok(())
    }

    /// The disk of this number, or the only one.
    fn disk(&self, number: Option<u64>) -> Result<&OvaDisk> {
        let wrong = |kind, why: String| Err(Error::new(kind, format!("ova: {}: {why}", self.name)));
        match (number, &self.disks[..]) {
            (_, []) => wrong(Kind::NotFound, "it has no disk with data".into()),
            (None, [only]) => Ok(only),
            (None, _) => {
                let text = format!(
                    "it has {} disks: choose one with ?disk=N, or copy all with ?disk=all: {}",
                    self.disks.len(),
                    self.list()
                );
                wrong(Kind::Usage, text)
            }
            (Some(number), disks) => {
                let index = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
                match index.and_then(|index| disks.get(index)) {
                    Some(disk) => Ok(disk),
                    None => wrong(
                        Kind::NotFound,
                        format!("there is no disk {number}: it has {}", self.list()),
                    ),
                }
            }
        }
    }

    /// The numbers and files of the disks, for users.
    fn list(&self) -> String {
        let one = |(number, disk): (usize, &OvaDisk)| {
            let size = disk
                .disk
                .capacity
                .map_or_else(String::new, |size| format!(", {}", format_size(size)));
            format!("{number} ({}{size})", disk.disk.file)
        };
        (1..).zip(&self.disks).map(one).collect::<Vec<_>>().join(", ")
    }
}

impl OvaDisk {
    /// The layers that show the file of the disk.
    fn layers(&self, registry: &Registry) -> Result<Vec<Arc<dyn Layer>>> {
        let ArchiveMember { offset, len, .. } = self.member;
        let mut layers = vec![registry.layer(&format!("offset?offset={offset}&range={len}"))?];
        if self.disk.gzip {
            layers.push(registry.layer("gz")?);
        }
        Ok(layers)
    }
}

async fn members(device: &Arc<dyn Device>) -> Result<Vec<ArchiveMember>> {
    let mut reader = ArchiveReader::new(device, u64::MAX);
    let mut members = Vec::new();
    while let Some(member) = reader.next().await? {
        if members.len() == MEMBERS_MAX {
            let text = format!("more than {MEMBERS_MAX} members");
            return Err(Error::new(Kind::Unsupported, text));
        }
        members.push(member);
    }
    Ok(members)
}

/// Whether a member is a file whose name ends this way.
fn is_file(member: &ArchiveMember, end: &[u8]) -> bool {
    member.kind == MemberKind::File
        && !member.is_apple_double()
        && member.name.to_ascii_lowercase().ends_with(end)
}

/// The text of a member, or why there is none.
async fn text_of(
    device: &Arc<dyn Device>,
    member: &ArchiveMember,
) -> std::result::Result<String, String> {
    if member.len > DESCRIPTION_MAX {
        return Err(format!("a description or manifest of {} bytes", member.len));
    }
    let bytes = crate::storage::read(device, member.offset, member.len).await;
    let bytes = bytes.map_err(|error| error.to_string())?;
    String::from_utf8(bytes.to_vec())
        .map_err(|_| "the description or manifest is not UTF-8".to_string())
}
