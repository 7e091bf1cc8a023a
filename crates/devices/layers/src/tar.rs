//! `tar`: a member of a tar file as a device.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{Layer, LayerBase, LayerKind, OpenFuture, ParamKind};

use crate::archive::{ArchiveMember, ArchiveReader, MemberKind};
use crate::declared::{param, param_or, usage};
use crate::offset::OffsetWindow;
use crate::per_disk::PerDisk;

/// The layer `tar`.
pub static TAR: LayerKind = LayerKind {
    name: "tar",
    summary: "serves a file inside a tar file (for example an OVA)",
    manual:
        "The member whose name is `tar-entry` (as `tar tf` prints it) is located once, when the \
device is first opened, and served in place: reads and writes go directly to the tar file. If no \
member has this name, the first one counts whose name differs only by `./` at the beginning. \
Writes change the tar file, but not checksums of this member that other members contain. Names \
in the formats ustar, GNU tar and pax are supported; a sparse member, and one that is not a \
regular file, is refused. A compressed tar file needs `gz` or `xz` below.

The search reads the header of each member in turn; `tar-limit` limits how far into the file \
it goes.",
    example: r#"
blockhaul copy sample:16M disk.raw && tar cf vm.ova disk.raw
blockhaul copy --verify --source-layer 'tar?tar-entry=disk.raw' vm.ova from-ova.raw
"#,
    needs_content: true,
    writes_below: true,
    transparent: false,
    params: &[
        param("tar-entry", ParamKind::Text, "Name of the member, with or without ./ before it."),
        param_or("tar-limit", ParamKind::Size, "0", "How far to search for it; 0: to the end."),
    ],
    changeable: &[],
    configure: |args| {
        let Some(entry) = args.text("tar-entry").filter(|entry| !entry.is_empty()) else {
            return Err(usage("tar: requires the name of a member: tar-entry=NAME"));
        };
        let limit = args.size("tar-limit").filter(|&limit| limit > 0).unwrap_or(u64::MAX);
        let tar = Tar { entry: entry.to_string(), limit, found: PerDisk::default() };
        Ok(Arc::new(tar))
    },
};

struct Tar {
    entry: String,
    limit: u64,
    /// The position of the member: offset and length, and the device's size at that time.
    found: PerDisk<MemberPlace>,
}

/// Maximum number of members in a message, and bytes of their names.
const LISTED_MAX: usize = 10;
const LISTED_NAME_MAX: usize = 100;

/// The position of a member in a device of this size.
struct MemberPlace {
    offset: u64,
    len: u64,
    size: u64,
}

impl Layer for Tar {
    fn wrap(&self, _inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Err(Error::new(Kind::Unsupported, "tar: the file must be opened with the layer"))
    }

    fn open(self: Arc<Self>, below: LayerBase) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(async move {
            let size = below.device.facts().size;
            let place = match self.found.known(&below).filter(|place| place.size == size) {
                Some(place) => place,
                None => {
                    let (offset, len) = self.find(&below.device).await?;
                    self.found.get(&below, || Ok(MemberPlace { offset, len, size }))?
                }
            };
            let window = OffsetWindow { offset: place.offset, range: Some(place.len) };
            let device = window.wrap(below.device)?;
            // The position is cached as long as a handle uses it.
            Ok(Arc::new(TarMember { device, _place: place }) as Arc<dyn Device>)
        })
    }
}

/// The member; keeps its position cached.
struct TarMember {
    device: Arc<dyn Device>,
    _place: Arc<MemberPlace>,
}

impl Device for TarMember {
    fn facts(&self) -> Arc<blockhaul_block::Facts> {
        self.device.facts()
    }

    fn submit(&self, request: blockhaul_block::Request) -> blockhaul_block::PendingRequest {
        self.device.submit(request)
    }

    fn file_at(
        &self,
        at: u64,
        len: u64,
        access: blockhaul_block::LeaseAccess,
    ) -> Option<blockhaul_block::FileRange> {
        self.device.file_at(at, len, access)
    }
}

/// The members that a search has seen.
#[derive(Default)]
struct Search {
    /// The first member whose name differs by a `./`.
    similar: Option<ArchiveMember>,
    names: Vec<String>,
    count: u64,
}

impl Search {
    fn add(&mut self, name: &[u8]) {
        self.count += 1;
        if self.names.len() < LISTED_MAX {
            let name = &name[..name.len().min(LISTED_NAME_MAX)];
            self.names.push(format!("{:?}", String::from_utf8_lossy(name)));
        }
    }

    /// The names of the members, for a message.
    fn list(&self) -> String {
        let more = if self.count > self.names.len() as u64 { ", …" } else { "" };
        match self.names.join(", ") {
            none if none.is_empty() => "it has no members".to_string(),
            names => format!("its members are {names}{more}"),
        }
    }
}

impl Tar {
    /// Offset and length of the member, both inside the device.
    async fn find(&self, device: &Arc<dyn Device>) -> Result<(u64, u64)> {
        let facts = device.facts();
        let wrong = |(kind, why)| Error::new(kind, format!("tar: {}: {why}", facts.name));
        let mut members = ArchiveReader::new(device, self.limit);
        let mut search = Search::default();
        while let Some(member) = members.next().await? {
            if member.name == self.entry.as_bytes() {
                return self.accepted(&member, facts.size).map_err(wrong);
            }
            search.add(&member.name);
            if member.is_called(self.entry.as_bytes()) {
                search.similar.get_or_insert(member);
            }
        }
        match &search.similar {
            Some(member) => self.accepted(member, facts.size).map_err(wrong),
            None => {
                let why = self.missing(&search, members.is_beyond_limit());
                Err(wrong((Kind::NotFound, why)))
            }
        }
    }

    /// What a search without result has found.
    fn missing(&self, search: &Search, is_beyond: bool) -> String {
        let Tar { entry, limit, .. } = self;
        if is_beyond {
            return format!("{entry:?} is not within the first {limit} bytes (tar-limit)");
        }
        format!("there is no member {entry:?}; {}", search.list())
    }

    /// Offset and length of a member, which is shown if it is a file within `size` bytes.
    fn accepted(&self, member: &ArchiveMember, size: u64) -> Result<(u64, u64), (Kind, String)> {
        let entry = &self.entry;
        let is_inside = member.offset.checked_add(member.len).is_some_and(|end| end <= size);
        match member.kind {
            MemberKind::Sparse => {
                let text = format!("{entry:?} is a sparse member, which is not supported");
                Err((Kind::Unsupported, text))
            }
            MemberKind::File if is_inside => Ok((member.offset, member.len)),
            MemberKind::File => Err((Kind::Invalid, format!("{entry:?} exceeds the file"))),
            MemberKind::Other => {
                Err((Kind::Unsupported, format!("{entry:?} is not a regular file")))
            }
        }
    }
}
