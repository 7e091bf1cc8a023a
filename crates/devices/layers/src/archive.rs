//! Members of tar files: the formats ustar, GNU tar and pax.

use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt as _, Error, Kind, Result};

/// Bytes of a header; contents fill up whole blocks.
pub const BLOCK: u64 = 512;
/// Bytes read at a time: headers of small members are close to each other.
const WINDOW: u64 = 64 << 10;
/// Maximum length of a member's name, or list of attributes.
pub const NAME_MAX: u64 = 1 << 20;

/// A member of a tar file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveMember {
    /// Its name, as it is stored.
    pub name: Vec<u8>,
    /// Offset of its contents in bytes.
    pub offset: u64,
    /// Length of its contents in bytes.
    pub len: u64,
    /// What it is.
    pub kind: MemberKind,
}

/// Kinds of members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberKind {
    /// A regular file, which is stored in one piece.
    File,
    /// A regular file whose holes are left out.
    Sparse,
    /// A directory, a link or a device.
    Other,
}

impl ArchiveMember {
    /// Whether two names are the same but for `./` at the beginning.
    pub fn is_called(&self, name: &[u8]) -> bool {
        without_here(&self.name) == without_here(name)
    }

    /// Whether it has attributes of the file system of macOS, which `tar` there stores as `._NAME` beside a file.
    pub fn is_apple_double(&self) -> bool {
        let last = self.name.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        last.starts_with(b"._")
    }
}

/// A name without `./` before it.
fn without_here(mut name: &[u8]) -> &[u8] {
    while let Some(rest) = name.strip_prefix(b"./") {
        name = rest;
    }
    name
}

/// The name of the first member of a tar file that begins with these bytes; `None` if it is no tar file, or one
/// from before 1988.
pub fn first_tar_member(head: &[u8]) -> Option<Vec<u8>> {
    let head = head.get(..BLOCK as usize).filter(|head| head[257..].starts_with(b"ustar"))?;
    MemberHeader::parse(head).map(|header| header.name)
}

/// Reads the members of a tar file in turn.
pub struct ArchiveReader<'a> {
    reader: TarReader<'a>,
    ahead: MemberOverrides,
    /// Offset of the next header.
    at: u64,
    /// Offset behind the last byte of a header that is read.
    limit: u64,
}

impl<'a> ArchiveReader<'a> {
    /// Reads a device from its beginning, and headers up to the offset `limit` in bytes.
    pub fn new(device: &'a Arc<dyn Device>, limit: u64) -> ArchiveReader<'a> {
        let size = device.facts().size;
        let reader = TarReader { device, size, at: 0, held: Vec::new() };
        ArchiveReader { reader, ahead: MemberOverrides::default(), at: 0, limit }
    }

    /// Whether the next header is beyond the limit.
    pub fn is_beyond_limit(&self) -> bool {
        self.at.saturating_add(BLOCK) > self.limit
    }

    /// The next member; `None` at the end of the archive or at the limit.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if a header is damaged, and errors of reading.
    pub async fn next(&mut self) -> Result<Option<ArchiveMember>> {
        loop {
            let Some(header) = self.header().await? else { return Ok(None) };
            let start = self.at + BLOCK;
            match header.kind {
                b'L' | b'x' => self.learn(&header, start).await?,
                // They apply to other members, or are not needed.
                b'g' | b'K' | b'V' => self.skip(start, header.size)?,
                _ => return self.member(header, start).map(Some),
            }
        }
    }

    async fn header(&mut self) -> Result<Option<MemberHeader>> {
        if self.is_beyond_limit() {
            return Ok(None);
        }
        let bytes = self.reader.bytes(self.at, BLOCK).await?;
        let Some(bytes) = bytes.filter(|header| header.iter().any(|&byte| byte != 0)) else {
            return Ok(None);
        };
        match MemberHeader::parse(&bytes) {
            Some(header) => Ok(Some(header)),
            None if self.at == 0 => Err(self.damaged("it is no tar archive".to_string())),
            None => Err(self.damaged(format!("no tar header at offset {}", self.at))),
        }
    }

    /// Reads a header that applies to the member after it.
    async fn learn(&mut self, header: &MemberHeader, start: u64) -> Result<()> {
        if header.size > NAME_MAX {
            let text = format!("a name of {} bytes at offset {}", header.size, self.at);
            return Err(self.damaged(text));
        }
        let Some(bytes) = self.reader.bytes(start, header.size).await? else {
            return Err(self.damaged("it ends within a name".into()));
        };
        self.ahead.learn(header.kind, &bytes);
        self.skip(start, header.size)
    }

    fn member(&mut self, header: MemberHeader, start: u64) -> Result<ArchiveMember> {
        let MemberOverrides { name, size, sparse, .. } = std::mem::take(&mut self.ahead);
        let len = size.unwrap_or(header.size);
        self.skip(start, len)?;
        let kind = match header.kind {
            _ if sparse => MemberKind::Sparse,
            b'S' => MemberKind::Sparse,
            b'0' | 0 | b'7' => MemberKind::File,
            _ => MemberKind::Other,
        };
        Ok(ArchiveMember { name: name.unwrap_or(header.name), offset: start, len, kind })
    }

    /// Goes on behind contents of `len` bytes at `start`.
    fn skip(&mut self, start: u64, len: u64) -> Result<()> {
        match next(start, len) {
            Some(at) => self.at = at,
            None => return Err(self.damaged(format!("a member of {len} bytes"))),
        }
        Ok(())
    }

    fn damaged(&self, why: String) -> Error {
        let name = &self.reader.device.facts().name;
        Error::new(Kind::Invalid, format!("tar: {name}: {why}"))
    }
}

/// Records before a member that apply only to it.
#[derive(Debug, Default)]
pub struct MemberOverrides {
    /// Its name.
    pub name: Option<Vec<u8>>,
    /// The name of the file that it links to.
    pub link: Option<Vec<u8>>,
    /// Length of its contents in bytes.
    pub size: Option<u64>,
    /// Whether its holes are left out.
    pub sparse: bool,
}

/// The position of the header after a member.
fn next(start: u64, len: u64) -> Option<u64> {
    start.checked_add(len.checked_next_multiple_of(BLOCK)?)
}

/// The header of a member, or of a record that applies to another member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberHeader {
    /// Its name, as it is stored.
    pub name: Vec<u8>,
    /// The name of the file that a link names.
    pub link: Vec<u8>,
    /// Length of what follows in bytes.
    pub size: u64,
    /// The type of the member, as it is stored.
    pub kind: u8,
}

impl MemberHeader {
    /// Parses a block of 512 bytes; `None`: it is not a header, or its checksum is wrong.
    pub fn parse(block: &[u8]) -> Option<MemberHeader> {
        let block = block.get(..BLOCK as usize)?;
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
        let (link, kind) = (text(157..257).to_vec(), block[156]);
        Some(MemberHeader { name, link, size: number(&block[124..136])?, kind })
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
    /// Adds the contents of a member of type `L` or `K` (GNU's long name of the next member, or of the file that it
    /// links to), or `x` (attributes of pax).
    pub fn learn(&mut self, kind: u8, bytes: &[u8]) {
        if matches!(kind, b'L' | b'K') {
            let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
            let name = Some(bytes[..end].to_vec());
            *(if kind == b'L' { &mut self.name } else { &mut self.link }) = name;
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
                b"linkpath" => self.link = Some(value.to_vec()),
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
