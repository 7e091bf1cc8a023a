//! Members of a layer, whose bytes come in parts.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_layers::support::{TAR_BLOCK, TAR_NAME_MAX};
use blockhaul_layers::{MemberHeader, MemberOverrides};

/// A member of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LayerMember {
    /// Its name, as it is stored.
    pub(super) name: Vec<u8>,
    /// The name of the file that a link names.
    pub(super) link: Vec<u8>,
    /// Bytes of its contents.
    pub(super) size: u64,
    pub(super) kind: LayerMemberKind,
}

/// Kinds of members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerMemberKind {
    File,
    /// A file whose holes are left out.
    Sparse,
    Directory,
    HardLink,
    SymbolicLink,
    Other,
}

/// Takes the members of a layer.
pub(super) trait MemberSink {
    /// Begins a member.
    ///
    /// # Errors
    /// It is not accepted.
    fn begin(&mut self, member: LayerMember) -> Result<()>;

    /// Takes bytes of the contents of the member that has begun.
    ///
    /// # Errors
    /// They cannot be stored.
    fn data(&mut self, bytes: &[u8]) -> Result<()>;
}

/// The position in a layer.
pub(super) struct TarScan {
    state: ScanState,
    overrides: MemberOverrides,
}

enum ScanState {
    /// In a header, of which these bytes are known.
    Header(Vec<u8>),
    /// In a record of this kind that applies to the next member: its bytes, and how many there are.
    Record(u8, Vec<u8>, usize),
    /// In contents: bytes that are left, and those that fill up the last block.
    Contents(u64, u64),
    /// So many bytes follow that are not needed.
    Skip(u64),
    Ended,
}

impl TarScan {
    pub(super) fn new() -> TarScan {
        TarScan { state: ScanState::Header(Vec::new()), overrides: MemberOverrides::default() }
    }

    /// Takes the next bytes of the layer.
    ///
    /// # Errors
    /// They are damaged, and errors of `sink`.
    pub(super) fn feed(&mut self, mut input: &[u8], sink: &mut impl MemberSink) -> Result<()> {
        while !input.is_empty() {
            let taken = match &mut self.state {
                ScanState::Header(known) => {
                    let more = input.len().min(index(TAR_BLOCK) - known.len());
                    known.extend_from_slice(&input[..more]);
                    if known.len() as u64 == TAR_BLOCK {
                        let block = std::mem::take(known);
                        self.header(&block, sink)?;
                    }
                    more
                }
                ScanState::Record(kind, known, len) => {
                    let more = input.len().min(*len - known.len());
                    known.extend_from_slice(&input[..more]);
                    if known.len() == *len {
                        self.overrides.learn(*kind, known);
                        self.state = ScanState::Skip(fill(*len as u64));
                    }
                    more
                }
                ScanState::Contents(left, fill) => {
                    let more = input.len().min(index(*left));
                    sink.data(&input[..more])?;
                    *left -= more as u64;
                    if *left == 0 {
                        self.state = ScanState::Skip(*fill);
                    }
                    more
                }
                ScanState::Skip(left) => {
                    let more = input.len().min(index(*left));
                    *left -= more as u64;
                    more
                }
                ScanState::Ended => return Ok(()),
            };
            input = &input[taken..];
            if let ScanState::Skip(0) = self.state {
                self.state = ScanState::Header(Vec::new());
            }
        }
        Ok(())
    }

    fn header(&mut self, block: &[u8], sink: &mut impl MemberSink) -> Result<()> {
        if block.iter().all(|&byte| byte == 0) {
            self.state = ScanState::Ended;
            return Ok(());
        }
        let header = MemberHeader::parse(block).ok_or_else(|| damaged("no header of a member"))?;
        match header.kind {
            b'L' | b'K' | b'x' => {
                if header.size > TAR_NAME_MAX {
                    return Err(damaged("a name that is too long"));
                }
                self.state = match header.size {
                    0 => ScanState::Header(Vec::new()),
                    len => ScanState::Record(header.kind, Vec::new(), index(len)),
                };
                return Ok(());
            }
            // They apply to other members.
            b'g' | b'V' => {
                self.state = ScanState::skip(header.size)?;
                return Ok(());
            }
            _ => {}
        }
        let MemberOverrides { name, link, size, sparse } = std::mem::take(&mut self.overrides);
        let kind = match header.kind {
            b'0' | 0 | b'7' if !sparse => LayerMemberKind::File,
            b'0' | 0 | b'7' | b'S' => LayerMemberKind::Sparse,
            b'5' => LayerMemberKind::Directory,
            b'1' => LayerMemberKind::HardLink,
            b'2' => LayerMemberKind::SymbolicLink,
            _ => LayerMemberKind::Other,
        };
        // Links, directories and devices have no contents, whatever their size is.
        let size = match header.kind {
            b'1'..=b'6' => 0,
            _ => size.unwrap_or(header.size),
        };
        let name = name.unwrap_or(header.name);
        let link = link.unwrap_or(header.link);
        let skipped = ScanState::skip(size)?;
        self.state = match kind {
            LayerMemberKind::File if size > 0 => ScanState::Contents(size, fill(size)),
            // The map of the holes of a sparse file is part of its contents.
            _ => skipped,
        };
        sink.begin(LayerMember { name, link, size, kind })
    }

    /// Checks that the layer may end here.
    ///
    /// # Errors
    /// It ends within a member.
    pub(super) fn finish(&self) -> Result<()> {
        match &self.state {
            ScanState::Ended => Ok(()),
            ScanState::Header(known) if known.is_empty() => Ok(()),
            _ => Err(damaged("its end is missing")),
        }
    }
}

impl ScanState {
    /// Behind contents of `len` bytes that are not needed.
    fn skip(len: u64) -> Result<ScanState> {
        let whole =
            len.checked_next_multiple_of(TAR_BLOCK).filter(|len| i64::try_from(*len).is_ok());
        whole.map(ScanState::Skip).ok_or_else(|| damaged("a member that is too long"))
    }
}

/// Bytes that fill up the last block of `len` bytes.
fn fill(len: u64) -> u64 {
    (TAR_BLOCK - len % TAR_BLOCK) % TAR_BLOCK
}

fn index(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

fn damaged(why: &str) -> Error {
    let text = format!("a layer of the image is damaged: {why}");
    Error::new(Kind::Invalid, text).with_remedy("push the image again")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Members(Vec<(LayerMember, Vec<u8>)>);

    impl MemberSink for Members {
        fn begin(&mut self, member: LayerMember) -> Result<()> {
            self.0.push((member, Vec::new()));
            Ok(())
        }

        fn data(&mut self, bytes: &[u8]) -> Result<()> {
            self.0.last_mut().unwrap().1.extend_from_slice(bytes);
            Ok(())
        }
    }

    fn header(name: &[u8], kind: u8, size: u64, link: &[u8]) -> Vec<u8> {
        let mut block = vec![0; 512];
        block[..name.len()].copy_from_slice(name);
        block[100..107].copy_from_slice(b"0000644");
        block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
        block[156] = kind;
        block[157..157 + link.len()].copy_from_slice(link);
        block[257..263].copy_from_slice(b"ustar\0");
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        block
    }

    fn member(name: &[u8], kind: u8, bytes: &[u8]) -> Vec<u8> {
        let mut all = header(name, kind, bytes.len() as u64, b"");
        all.extend_from_slice(bytes);
        all.resize(all.len().next_multiple_of(512), 0);
        all
    }

    fn scan(bytes: &[u8], piece: usize) -> Result<Vec<(LayerMember, Vec<u8>)>> {
        let (mut scan, mut members) = (TarScan::new(), Members::default());
        for part in bytes.chunks(piece) {
            scan.feed(part, &mut members)?;
        }
        scan.finish().map(|()| members.0)
    }

    #[test]
    fn members_and_their_long_names_are_found_in_parts_of_any_length() {
        let long = "n".repeat(300);
        let all = [
            member(b"disk/", b'5', b""),
            member(b"././@LongLink", b'L', format!("disk/{long}\0").as_bytes()),
            member(b"short", b'0', b"content"),
            member(b"pax", b'x', b"18 path=disk/name\n19 linkpath=target\n"),
            header(b"x", b'1', 700, b"y"),
            member(b"pax", b'x', b"22 GNU.sparse.major=1\n"),
            member(b"holes", b'0', &[7; 600]),
            member(b"global", b'g', b"12 path=all\n"),
            member(b"old", 0, &[8; 512]),
            member(b"empty", b'0', b""),
            header(b"symlink", b'2', 0, b"to"),
            vec![0; 1024],
            b"trailing".to_vec(),
        ]
        .concat();
        for piece in [1, 511, 512, 513, all.len()] {
            let found = scan(&all, piece).unwrap();
            let names: Vec<_> = found
                .iter()
                .map(|(one, _)| (String::from_utf8_lossy(&one.name).into_owned(), one.kind))
                .collect();
            use LayerMemberKind::*;
            assert_eq!(
                names,
                [
                    ("disk/".to_owned(), Directory),
                    (format!("disk/{long}"), File),
                    ("disk/name".to_owned(), HardLink),
                    ("holes".to_owned(), Sparse),
                    ("old".to_owned(), File),
                    ("empty".to_owned(), File),
                    ("symlink".to_owned(), SymbolicLink),
                ]
            );
            assert_eq!(found[1].1, b"content");
            assert_eq!((found[2].0.link.as_slice(), found[2].0.size), (&b"target"[..], 0));
            assert_eq!(found[4].1, [8; 512]);
            assert_eq!(found[6].0.link, b"to");
        }
    }

    #[test]
    fn damaged_layers_are_errors() {
        let whole = member(b"a", b'0', &[1; 600]);
        for end in [1, 511, 512, 513, 1100, whole.len() - 1] {
            assert_eq!(scan(&whole[..end], 100).unwrap_err().kind(), Kind::Invalid, "{end}");
        }
        assert_eq!(scan(&whole, 100).unwrap().len(), 1);
        assert!(scan(&[1; 512], 512).is_err());
        assert!(scan(&member(b"x", b'L', &[0; 2 << 20]), 4096).is_err());
        let mut huge = header(b"a", b'0', 0, b"");
        huge[124..136]
            .copy_from_slice(&[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        huge[148..156].fill(b' ');
        let sum: u32 = huge.iter().map(|&byte| u32::from(byte)).sum();
        huge[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        assert!(scan(&huge, 512).unwrap_err().to_string().contains("too long"));
        assert!(scan(b"", 1).unwrap().is_empty());
    }
}
