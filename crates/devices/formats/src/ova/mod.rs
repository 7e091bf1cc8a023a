//! `ova:FILE`: a disk of a virtual machine in an OVA, a tar archive with a description of the machine.
//!
//! - `ovf`: the description.
//! - `manifest`: digests of the files.
//! - `named`: a disk under the name that the user gave.

mod manifest;
mod named;
mod ovf;

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    ArchivedDisk, Backend, BackendTarget, DeviceSpec, HandleOpener, ImageFormat, Intent, Layer,
    OpenContext, OpenFuture, OpenedDevice, Param, ParamKind, Registry, Stack, format_size,
    percent_decode,
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
/// The format of a disk whose file is the disk, byte for byte.
const RAW: &str = "raw";
/// What to do about an archive that has lost its end.
const AGAIN: &str = "get the OVA again";

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
                      In copy also all: {} is the number then in the target, and in the names of --journal, \
                      --manifest, --since and --error-map.",
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
    let number = target.args.text("disk").map(number).transpose()?;
    let disk = contents.disk(number)?;
    if target.args.text("manifest") != Some("ignore") {
        contents.check(archive.device(), disk).await?;
    }
    drop(archive);
    let layers = disk.layers(registry)?;
    let stack = registry.open(&spec, layers, intent).await?;
    let opened = disk_in(&target.context, stack, intent).await?;
    let option = number.map_or_else(String::new, |number| format!("?disk={number}"));
    Ok(named::named(opened, &format!("{SCHEME}:{}{option}", contents.name)))
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
    let format = format_of(&device).await?;
    let more = stack.has_more().then(|| Arc::new(StackHandles(stack)) as Arc<dyn HandleOpener>);
    let opened = OpenedDevice { device, more };
    let Some(format) = format else { return Ok(opened) };
    // Whoever wrote the archive chooses the names in its images.
    let names = if format.names_files { "?names=refuse" } else { "" };
    let context = context.with_backend(held(opened));
    context.open(&format!("{}:{HELD}:{names}", format.scheme), intent).await
}

/// The format of the image on a device; `None` if it is no image.
async fn format_of(device: &Arc<dyn Device>) -> Result<Option<&'static ImageFormat>> {
    let len = len_of(&device.facts()).min(ImageFormat::HEAD as u64);
    let head = crate::storage::read(device, 0, len).await?;
    Ok(ImageFormat::of_head(&head))
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

    /// The archive whose disks a description may stand for: `ova:DEVICE` without the number of a disk, with or without
    /// other options; `None` for other devices.
    pub fn archive_of(spec: &DeviceSpec) -> Option<DeviceSpec> {
        let DeviceSpec::Scheme { scheme, rest } = spec else { return None };
        let (place, options) = rest.split_once('?').unwrap_or((rest, ""));
        let has_number =
            |option: &str| option.strip_prefix("disk=").is_some_and(|value| value != ALL);
        if scheme != SCHEME || options.split('&').any(has_number) {
            return None;
        }
        let place = percent_decode(place).ok().filter(|place| !place.is_empty())?;
        DeviceSpec::parse(place.as_ref()).ok()
    }

    /// The facts of the disks in an archive. Their contents are not compared with the manifest.
    ///
    /// # Errors
    /// Those of opening the archive, and of its description. A disk that cannot be opened has the size that the
    /// description gives.
    pub async fn list(registry: &Registry, archive: &DeviceSpec) -> Result<Vec<ArchivedDisk>> {
        let intent = Intent::READ_IMAGE;
        let stack = registry.open(archive, Vec::new(), intent).await?;
        let contents = OvaContents::read(stack.device()).await?;
        drop(stack);
        let mut disks = Vec::new();
        for disk in &contents.disks {
            let stack = registry.open(archive, disk.layers(registry)?, intent).await?;
            let format = format_of(stack.device()).await.ok().flatten();
            let disk_size = match format {
                None => Some(stack.device().facts().size),
                Some(_) => disk_in(&OpenContext::new(registry), stack, intent)
                    .await
                    .map_or(disk.disk.capacity, |opened| Some(opened.device.facts().size)),
            };
            disks.push(ArchivedDisk {
                number: disks.len() as u64 + 1,
                file: disk.disk.file.clone(),
                format: format.map_or(RAW, |format| format.name),
                disk_size,
                file_size: disk.member.len,
            });
        }
        Ok(disks)
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
        let name = device.facts().name.to_string();
        refuse_other_files(device).await?;
        let members = members(device).await?;
        let Some(description) = members.iter().find(|member| is_file(member, b".ovf")) else {
            let text = "it has no OVF description (NAME.ovf)";
            let remedy = "use the layer tar for a member of another archive";
            return Err(Error::new(Kind::Invalid, text).with_remedy(remedy));
        };
        let text = text_of(device, description).await?;
        let found = ovf::disks(&text)
            .map_err(|why| Error::new(Kind::Unsupported, format!("the OVF description: {why}")))?;
        let size = device.facts().size;
        let disks = (1_usize..).zip(found);
        let disks = disks.map(|(number, disk)| OvaDisk::find(number, disk, &members, size));
        let disks = disks.collect::<Result<_>>()?;
        let description = description.clone();
        let manifest = members.iter().find(|member| is_file(member, b".mf")).cloned();
        Ok(OvaContents { name, disks, description, manifest })
    }

    /// Compares the description and the file of a disk with their digests in the manifest, if there is one.
    async fn check(&self, device: &Arc<dyn Device>, disk: &OvaDisk) -> Result<()> {
        let Some(member) = &self.manifest else { return Ok(()) };
        let text = text_of(device, member).await?;
        let name = String::from_utf8_lossy(&member.name);
        let manifest = OvaManifest::parse(&name, &text);
        let manifest = manifest.map_err(|why| Error::new(Kind::Invalid, why))?;
        for file in [&self.description, &disk.member] {
            manifest.check(device, file).await?;
        }
        Ok(())
    }

    /// The disk of this number, or the only one.
    fn disk(&self, number: Option<u64>) -> Result<&OvaDisk> {
        match (number, &self.disks[..]) {
            (_, []) => Err(Error::new(Kind::NotFound, "it has no disk with data")),
            (None, [only]) => Ok(only),
            (None, _) => {
                // Front ends do not name the device in errors of this kind.
                let text = format!(
                    "{SCHEME}:{}: it has {} disks: choose one with ?disk=N, or copy all with ?disk=all: {}",
                    self.name,
                    self.disks.len(),
                    self.list()
                );
                Err(Error::new(Kind::Usage, text))
            }
            (Some(number), disks) => {
                let index = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
                match index.and_then(|index| disks.get(index)) {
                    Some(disk) => Ok(disk),
                    None => {
                        let text = format!("there is no disk {number}: it has {}", self.list());
                        Err(Error::new(Kind::NotFound, text).complete())
                    }
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
    /// The place of a disk among the members of an archive of `size` bytes.
    fn find(number: usize, disk: OvfDisk, members: &[ArchiveMember], size: u64) -> Result<OvaDisk> {
        let file = &disk.file;
        let member = members.iter().find(|member| member.is_called(file.as_bytes()));
        let Some(member) = member else {
            let text = format!("the file {file:?} of disk {number} is not in the archive");
            return Err(Error::new(Kind::NotFound, text).with_remedy(AGAIN));
        };
        if member.kind != MemberKind::File {
            let text =
                format!("{file:?} of disk {number} is stored as a sparse file, or is no file");
            let remedy = "pack the files again, without the option --sparse of tar";
            return Err(Error::new(Kind::Unsupported, text).with_remedy(remedy));
        }
        if member.offset.checked_add(member.len).is_none_or(|end| end > size) {
            let text = format!("the archive ends within the file {file:?} of disk {number}");
            return Err(Error::new(Kind::Invalid, text).with_remedy(AGAIN));
        }
        Ok(OvaDisk { member: member.clone(), disk })
    }

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

/// The text of a member.
async fn text_of(device: &Arc<dyn Device>, member: &ArchiveMember) -> Result<String> {
    if member.len > DESCRIPTION_MAX {
        let text = format!("a description or manifest of {} bytes", member.len);
        return Err(Error::new(Kind::Unsupported, text));
    }
    if member.offset.checked_add(member.len).is_none_or(|end| end > device.facts().size) {
        let text = "the archive ends within its description or manifest";
        return Err(Error::new(Kind::Invalid, text).with_remedy(AGAIN));
    }
    let bytes = crate::storage::read(device, member.offset, member.len).await?;
    let text = "the description or manifest is not UTF-8";
    String::from_utf8(bytes.to_vec()).map_err(|_| Error::new(Kind::Invalid, text))
}

/// Refuses files that users take for an OVA: a packed one, and a description alone.
async fn refuse_other_files(device: &Arc<dyn Device>) -> Result<()> {
    let len = len_of(&device.facts()).min(4);
    let head = crate::storage::read(device, 0, len).await?;
    let (text, remedy) = match &head[..] {
        [0x1f, 0x8b, ..] => {
            ("the archive is packed with gzip", "unpack it first: gunzip FILE.ova.gz")
        }
        [b'<', ..] | [0xef, 0xbb, 0xbf, b'<'] => (
            "it is an OVF description, and not an archive with it",
            "give the file of the disk, as in vmdk:vm-disk1.vmdk, or pack them: \
             tar cf vm.ova vm.ovf vm-disk1.vmdk",
        ),
        _ => return Ok(()),
    };
    Err(Error::new(Kind::Unsupported, text).with_remedy(remedy))
}
