//! `tar`: a member of a tar file as a device.

use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt, Error, Kind, Result};
use blockhaul_catalog::{Layer, LayerBase, LayerKind, OpenFuture, ParamKind};

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

const BLOCK: u64 = 512;
/// Bytes read at a time: headers of small members are close to each other.
const WINDOW: u64 = 64 << 10;
/// Maximum length of a member's name, or list of attributes.
const NAME_MAX: u64 = 1 << 20;

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

/// Records before a member that apply only to it.
#[derive(Default)]
struct MemberOverrides {
    name: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

/// A member that has the name.
#[derive(Clone, Copy)]
struct FoundMember {
    start: u64,
    len: u64,
    kind: u8,
}

/// The members that a search has seen.
#[derive(Default)]
struct Search {
    /// The first member whose name differs by a `./`.
    similar: Option<FoundMember>,
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

/// A name without `./` before it.
fn plain(mut name: &[u8]) -> &[u8] {
    while let Some(rest) = name.strip_prefix(b"./") {
        name = rest;
    }
    name
}

impl Tar {
    /// Offset and length of the member, both inside the device.
    async fn find(&self, device: &Arc<dyn Device>) -> Result<(u64, u64)> {
        let name = device.facts().name.clone();
        let wrong = |kind, why: String| Error::new(kind, format!("tar: {name}: {why}"));
        let size = device.facts().size;
        let mut reader = TarReader { device, size, at: 0, held: Vec::new() };
        let mut ahead = MemberOverrides::default();
        let mut search = Search::default();
        let mut at = 0_u64;
        let accepted = |member| self.accepted(member, size).map_err(|(kind, why)| wrong(kind, why));
        loop {
            let is_beyond = at.saturating_add(BLOCK) > self.limit;
            let header = if is_beyond { None } else { reader.bytes(at, BLOCK).await? };
            let Some(header) = header.filter(|header| header.iter().any(|&byte| byte != 0)) else {
                return match search.similar {
                    Some(member) => accepted(member),
                    None => Err(wrong(Kind::NotFound, self.missing(&search, is_beyond))),
                };
            };
            let Some(header) = MemberHeader::parse(&header) else {
                return Err(wrong(Kind::Invalid, format!("no tar header at offset {at}")));
            };
            let start = at + BLOCK;
            match header.kind {
                b'L' | b'x' => {
                    if header.size > NAME_MAX {
                        let text = format!("a name of {} bytes at offset {at}", header.size);
                        return Err(wrong(Kind::Invalid, text));
                    }
                    let Some(bytes) = reader.bytes(start, header.size).await? else {
                        return Err(wrong(Kind::Invalid, "it ends within a name".into()));
                    };
                    ahead.learn(header.kind, &bytes);
                    at = next(start, header.size).ok_or_else(|| {
                        wrong(Kind::Invalid, format!("a member of {} bytes", header.size))
                    })?;
                    continue;
                }
                // They apply to other members, or are not needed.
                b'g' | b'K' | b'V' => {}
                _ => {
                    let MemberOverrides { name, size, sparse } = std::mem::take(&mut ahead);
                    let len = size.unwrap_or(header.size);
                    let kind = if sparse { b'S' } else { header.kind };
                    let name = name.as_deref().unwrap_or(&header.name);
                    let member = FoundMember { start, len, kind };
                    if name == self.entry.as_bytes() {
                        return accepted(member);
                    }
                    if plain(name) == plain(self.entry.as_bytes()) {
                        search.similar.get_or_insert(member);
                    }
                    search.add(name);
                    let Some(next) = next(start, len) else {
                        return Err(wrong(Kind::Invalid, format!("a member of {len} bytes")));
                    };
                    at = next;
                    continue;
                }
            }
            at = next(start, header.size).ok_or_else(|| {
                wrong(Kind::Invalid, format!("a member of {} bytes", header.size))
            })?;
        }
    }
}

impl Tar {
    /// What a search without result has found.
    fn missing(&self, search: &Search, is_beyond: bool) -> String {
        let Tar { entry, limit, .. } = self;
        if is_beyond {
            return format!("{entry:?} is not within the first {limit} bytes (tar-limit)");
        }
        format!("there is no member {entry:?}; {}", search.list())
    }

    /// Offset and length of a member, which is shown if it is a file within `size` bytes.
    fn accepted(&self, member: FoundMember, size: u64) -> Result<(u64, u64), (Kind, String)> {
        let FoundMember { start, len, kind } = member;
        let is_inside = start.checked_add(len).is_some_and(|end| end <= size);
        self.refusal(kind, is_inside).map_or(Ok((start, len)), Err)
    }

    /// Why a member of this kind cannot be shown; none: it can.
    fn refusal(&self, kind: u8, is_inside: bool) -> Option<(Kind, String)> {
        let entry = &self.entry;
        match kind {
            b'S' => {
                let text = format!("{entry:?} is a sparse member, which is not supported");
                Some((Kind::Unsupported, text))
            }
            b'0' | 0 | b'7' if is_inside => None,
            b'0' | 0 | b'7' => Some((Kind::Invalid, format!("{entry:?} exceeds the file"))),
            _ => Some((Kind::Unsupported, format!("{entry:?} is not a regular file"))),
        }
    }
}

/// The position of the header after a member.
fn next(start: u64, len: u64) -> Option<u64> {
    start.checked_add(len.checked_next_multiple_of(BLOCK)?)
}

struct MemberHeader {
    name: Vec<u8>,
    size: u64,
    kind: u8,
}

impl MemberHeader {
    /// Parses a header; `None`: it is not one, or its checksum is wrong.
    fn parse(block: &[u8]) -> Option<MemberHeader> {
        let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
        let told: u64 = block[148..156].iter().map(|&byte| u64::from(byte)).sum();
        // The field itself counts as blanks.
        if number(&block[148..156])? != sum - told + 8 * u64::from(b' ') {
            return None;
        }
        let text = |range: std::ops::Range<usize>| {
            let field = &block[range];
            field.iter().position(|&byte| byte == 0).map_or(field, |end| &field[..end])
        };
        let mut name = text(0..100).to_vec();
        // GNU's own headers have other data in place of the prefix.
        if &block[257..263] == b"ustar\0" && block[345] != 0 {
            name = [text(345..500), b"/", &name].concat();
        }
        Some(MemberHeader { name, size: number(&block[124..136])?, kind: block[156] })
    }
}

/// A number: octal digits, or GNU's binary form for large ones.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let first = u64::from(field[0] & 0x7f);
        let rest = &field[1..];
        return rest.iter().try_fold(first, |value, &byte| {
            value.checked_mul(256).map(|value| value | u64::from(byte))
        });
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\0']);
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

impl MemberOverrides {
    /// What a member of type `L` (GNU's long name) or `x` (pax attributes) says about the next one.
    fn learn(&mut self, kind: u8, bytes: &[u8]) {
        if kind == b'L' {
            let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
            self.name = Some(bytes[..end].to_vec());
            return;
        }
        let mut rest = bytes;
        // Records: length in decimal of all of it, blank, key=value, newline.
        while let Some(blank) = rest.iter().position(|&byte| byte == b' ') {
            let len = std::str::from_utf8(&rest[..blank]).ok().and_then(|len| len.parse().ok());
            let Some(len) = len.filter(|&len: &usize| len > blank + 1 && len <= rest.len()) else {
                return;
            };
            let record = &rest[blank + 1..len - 1];
            rest = &rest[len..];
            let Some(equals) = record.iter().position(|&byte| byte == b'=') else { continue };
            let key = &record[..equals];
            let value = &record[equals + 1..];
            let text = std::str::from_utf8(value).unwrap_or_default();
            match key {
                b"path" => self.name = Some(value.to_vec()),
                b"size" => self.size = text.parse().ok().or(self.size),
                _ if key.starts_with(b"GNU.sparse.") => {
                    self.sparse = true;
                    if key == b"GNU.sparse.name" {
                        self.name = Some(value.to_vec());
                    }
                }
                _ => {}
            }
        }
    }
}

/// Reads pieces that are often close to each other.
struct TarReader<'a> {
    device: &'a Arc<dyn Device>,
    size: u64,
    at: u64,
    held: Vec<u8>,
}

impl TarReader<'_> {
    /// Bytes of the device; `None` beyond its end.
    async fn bytes(&mut self, at: u64, len: u64) -> Result<Option<Vec<u8>>> {
        if at.checked_add(len).is_none_or(|end| end > self.size) {
            return Ok(None);
        }
        let mut found = Vec::new();
        let mut next = at;
        while (found.len() as u64) < len {
            let end = self.at + self.held.len() as u64;
            if next < self.at || next >= end {
                let now = WINDOW.min(self.size - next);
                self.held = self.device.read(next, now as usize).await?.bytes().to_vec();
                self.at = next;
                continue;
            }
            let from = (next - self.at) as usize;
            let now = (len as usize - found.len()).min(self.held.len() - from);
            found.extend_from_slice(&self.held[from..from + now]);
            next += now as u64;
        }
        Ok(Some(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_binary() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"  12 \0"), Some(10));
        assert_eq!(number(b"\0\0\0"), Some(0));
        assert_eq!(number(&[0x80, 0, 1, 0]), Some(256));
        assert_eq!(number(b"9"), None);
        assert_eq!(number(&[0xff; 12]), None, "too large");
    }

    #[test]
    fn attributes_of_pax_are_read_and_nonsense_is_left() {
        let learnt = |bytes: &[u8]| {
            let mut ahead = MemberOverrides::default();
            ahead.learn(b'x', bytes);
            (ahead.name, ahead.size, ahead.sparse)
        };
        let text = b"19 path=long/name.x\n20 size=12345678901\n";
        assert_eq!(learnt(b"16 path=long/na\n"), (Some(b"long/na".to_vec()), None, false));
        assert_eq!(learnt(&text[20..]), (None, Some(12_345_678_901), false));
        assert_eq!(learnt(b"22 GNU.sparse.major=1\n"), (None, None, true));
        for nonsense in [&b"99 path=x\n"[..], b"0 x", b" ", b"4 \xff\n", b"2 ", b"x 1=2\n"] {
            assert_eq!(learnt(nonsense), (None, None, false), "{nonsense:?}");
        }
    }
}
