//! Requests of the kernel.

use std::fmt;

use super::numbers::{HEADER, WRITE_HEADER, init_flags, write_flags};

/// Maximum length of a name in bytes: that of the kernel.
const NAME_MAX: usize = 4096;

/// What every request begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InHeader {
    /// Length of the request in bytes, with its header and data.
    pub len: u32,
    /// The number of its operation.
    pub opcode: u32,
    /// Identifies the request in its reply.
    pub unique: u64,
    /// The file.
    pub node: u64,
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelRequest<'a> {
    /// Its header.
    pub header: InHeader,
    /// What to do.
    pub operation: Operation<'a>,
}

/// The first request of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Init {
    /// The kernel's major version of the protocol.
    pub major: u32,
    /// Its minor version.
    pub minor: u32,
    /// Maximum bytes that the kernel reads ahead.
    pub max_readahead: u32,
    /// What the kernel supports ([`init_flags`]).
    pub flags: u64,
}

/// Attributes to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetAttr {
    /// Which ([`super::numbers::set_flags`]).
    pub valid: u32,
    /// The size in bytes.
    pub size: u64,
    /// Kind of file and permissions.
    pub mode: u32,
}

/// What to search for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeekTarget {
    /// The next byte of data.
    Data,
    /// The next byte of a hole, or the end of the file.
    Hole,
}

/// The operations that a server of a few files needs, with their arguments. Offsets and lengths are
/// in bytes and may have any value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the system calls")]
pub enum Operation<'a> {
    Init(Init),
    Lookup(&'a [u8]),
    /// Nodes that the kernel does not know any more; without a reply.
    Forget,
    GetAttr,
    SetAttr(SetAttr),
    Open {
        flags: u32,
    },
    OpenDir,
    Read {
        at: u64,
        len: u32,
    },
    /// The data follows the arguments.
    Write {
        at: u64,
        len: u32,
        /// Flags of open(2).
        flags: u32,
        /// It comes from the page cache, and no program waits for it.
        cached: bool,
    },
    Statfs,
    Release,
    ReleaseDir,
    Fsync,
    ReadDir {
        at: u64,
        len: u32,
    },
    Allocate {
        at: u64,
        len: u64,
        mode: u32,
    },
    /// No whence: it is neither data nor hole.
    Seek {
        at: u64,
        whence: Option<SeekTarget>,
    },
    /// The request with this number is not waited for any more; without a reply.
    Interrupt(u64),
    /// The file system was unmounted.
    Destroy,
    Other,
}

/// Why bytes are no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MalformedRequest {
    /// The number for a reply, if it is known.
    pub unique: Option<u64>,
    /// What is wrong.
    pub why: &'static str,
}

impl fmt::Display for MalformedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.why)
    }
}

impl std::error::Error for MalformedRequest {}

impl InHeader {
    /// The header at the beginning of `bytes`.
    ///
    /// # Errors
    /// [`MalformedRequest`] if the message is shorter than its header says.
    pub fn parse(bytes: &[u8]) -> Result<InHeader, MalformedRequest> {
        let mut fields = ArgumentReader(bytes.get(..HEADER).ok_or(SHORT_HEADER)?);
        let mut next = || fields.u32().ok_or(SHORT_HEADER);
        let len = next()?;
        let opcode = next()?;
        let mut next = || fields.u64().ok_or(SHORT_HEADER);
        Ok(InHeader { len, opcode, unique: next()?, node: next()? })
    }
}

const SHORT_HEADER: MalformedRequest =
    MalformedRequest { unique: None, why: "shorter than its header" };

impl<'a> KernelRequest<'a> {
    /// Parses a request of `total` bytes of which these are the first: all of them, except for the
    /// data of a write.
    ///
    /// # Errors
    /// If the length is not that of the header, or too short for the arguments of the operation.
    pub fn parse(bytes: &'a [u8], total: usize) -> Result<KernelRequest<'a>, MalformedRequest> {
        let header = InHeader::parse(bytes)?;
        let malformed = |why| MalformedRequest { unique: Some(header.unique), why };
        if usize::try_from(header.len) != Ok(total) || bytes.len() > total {
            return Err(malformed("not as long as its header says"));
        }
        let arguments = &bytes[HEADER..];
        let operation = operation(header.opcode, arguments)
            .ok_or_else(|| malformed("shorter than its arguments, or with a wrong name"))?;
        if let Operation::Write { len, .. } = operation
            && total.checked_sub(WRITE_HEADER) != usize::try_from(len).ok()
        {
            return Err(malformed("a write with less or more data than it says"));
        }
        Ok(KernelRequest { header, operation })
    }
}

/// The operation of this number; `None` if its arguments are too short or invalid.
fn operation(opcode: u32, arguments: &[u8]) -> Option<Operation<'_>> {
    let mut fields = ArgumentReader(arguments);
    let operation = match opcode {
        1 => Operation::Lookup(name(arguments)?),
        2 | 42 => Operation::Forget,
        3 => Operation::GetAttr,
        4 => Operation::SetAttr(set_attr(fields)?),
        14 => Operation::Open { flags: fields.u32()? },
        15 => {
            let (at, len) = range(&mut fields)?;
            Operation::Read { at, len }
        }
        16 => write(fields)?,
        17 => Operation::Statfs,
        18 => Operation::Release,
        20 => Operation::Fsync,
        26 => Operation::Init(init(fields)?),
        27 => Operation::OpenDir,
        28 => {
            let (at, len) = range(&mut fields)?;
            Operation::ReadDir { at, len }
        }
        29 => Operation::ReleaseDir,
        36 => Operation::Interrupt(fields.u64()?),
        38 => Operation::Destroy,
        43 => allocate(fields)?,
        46 => seek(fields)?,
        _ => Operation::Other,
    };
    Some(operation)
}

/// A name, with the zero byte that ends it.
fn name(arguments: &[u8]) -> Option<&[u8]> {
    let name = arguments.strip_suffix(&[0])?;
    let fits = !name.is_empty() && name.len() < NAME_MAX && !name.contains(&0);
    fits.then_some(name)
}

fn init(mut fields: ArgumentReader<'_>) -> Option<Init> {
    let major = fields.u32()?;
    let minor = fields.u32()?;
    let max_readahead = fields.u32()?;
    let low = u64::from(fields.u32()?);
    // Older kernels end here.
    let high = match low & init_flags::EXTENDED {
        0 => 0,
        _ => u64::from(fields.u32().unwrap_or(0)),
    };
    Some(Init { major, minor, max_readahead, flags: low | high << 32 })
}

fn set_attr(mut fields: ArgumentReader<'_>) -> Option<SetAttr> {
    let valid = fields.u32()?;
    let _padding = fields.u32()?;
    let _handle = fields.u64()?;
    let size = fields.u64()?;
    // The lock's owner and times.
    fields.skip(44)?;
    let mode = fields.u32()?;
    // User and group.
    fields.skip(16)?;
    Some(SetAttr { valid, size, mode })
}

/// A handle, an offset and a length, as reads begin.
fn range(fields: &mut ArgumentReader<'_>) -> Option<(u64, u32)> {
    let _handle = fields.u64()?;
    Some((fields.u64()?, fields.u32()?))
}

fn write(mut fields: ArgumentReader<'_>) -> Option<Operation<'_>> {
    let (at, len) = range(&mut fields)?;
    let cached = fields.u32()? & write_flags::CACHE != 0;
    let _owner = fields.u64()?;
    let flags = fields.u32()?;
    fields.u32()?;
    Some(Operation::Write { at, len, flags, cached })
}

fn allocate(mut fields: ArgumentReader<'_>) -> Option<Operation<'_>> {
    let _handle = fields.u64()?;
    Some(Operation::Allocate { at: fields.u64()?, len: fields.u64()?, mode: fields.u32()? })
}

fn seek(mut fields: ArgumentReader<'_>) -> Option<Operation<'_>> {
    let _handle = fields.u64()?;
    let at = fields.u64()?;
    let whence = match fields.u32()? {
        3 => Some(SeekTarget::Data),
        4 => Some(SeekTarget::Hole),
        _ => None,
    };
    Some(Operation::Seek { at, whence })
}

/// Numbers one after the other.
struct ArgumentReader<'a>(&'a [u8]);

impl ArgumentReader<'_> {
    fn u32(&mut self) -> Option<u32> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*number))
    }

    fn u64(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*number))
    }

    fn skip(&mut self, count: usize) -> Option<()> {
        self.0 = self.0.get(count..)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A request of these arguments.
    fn request(opcode: u32, arguments: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let len = u32::try_from(HEADER + arguments.len()).unwrap();
        bytes.extend(len.to_ne_bytes());
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(77_u64.to_ne_bytes());
        bytes.extend(2_u64.to_ne_bytes());
        bytes.extend([0; 16]);
        bytes.extend(arguments);
        bytes
    }

    fn numbers(numbers: &[(u64, usize)]) -> Vec<u8> {
        let bytes = |&(number, len): &(u64, usize)| match len {
            4 => u32::try_from(number).unwrap().to_ne_bytes().to_vec(),
            _ => number.to_ne_bytes().to_vec(),
        };
        numbers.iter().flat_map(bytes).collect()
    }

    fn parsed(bytes: &[u8]) -> Result<Operation<'_>, MalformedRequest> {
        KernelRequest::parse(bytes, bytes.len()).map(|request| request.operation)
    }

    #[test]
    fn arguments_are_where_the_kernels_structures_have_them() {
        let read = numbers(&[(9, 8), (4096, 8), (512, 4), (0, 4), (0, 8), (0, 4), (0, 4)]);
        let bytes = request(15, &read);
        let header = KernelRequest::parse(&bytes, bytes.len()).unwrap().header;
        assert_eq!((header.unique, header.node, header.len), (77, 2, 80));
        assert_eq!(parsed(&bytes), Ok(Operation::Read { at: 4096, len: 512 }));
        let mut write = numbers(&[(9, 8), (7, 8), (3, 4), (1, 4), (5, 8), (0o10001, 4), (0, 4)]);
        write.extend(b"abc");
        let bytes = request(16, &write);
        let asked = Operation::Write { at: 7, len: 3, flags: 0o10001, cached: true };
        assert_eq!(parsed(&bytes), Ok(asked));
        let first = KernelRequest::parse(&bytes[..WRITE_HEADER], bytes.len()).unwrap();
        assert_eq!(first.operation, asked, "the data need not be there");
        let allocate = request(43, &numbers(&[(9, 8), (1, 8), (2, 8), (3, 4), (0, 4)]));
        assert_eq!(parsed(&allocate), Ok(Operation::Allocate { at: 1, len: 2, mode: 3 }));
        let seek = request(46, &numbers(&[(9, 8), (5, 8), (4, 4), (0, 4)]));
        assert_eq!(parsed(&seek), Ok(Operation::Seek { at: 5, whence: Some(SeekTarget::Hole) }));
        let mut set = numbers(&[(8, 4), (0, 4), (0, 8), (123, 8)]);
        set.extend(numbers(&[(0, 8), (0, 8), (0, 8), (0, 8), (0, 4), (0, 4), (0, 4)]));
        set.extend(numbers(&[(0o100_644, 4), (0, 4), (1000, 4), (1000, 4), (0, 4)]));
        let set = request(4, &set);
        let asked = SetAttr { valid: 8, size: 123, mode: 0o100_644 };
        assert_eq!(parsed(&set), Ok(Operation::SetAttr(asked)));
        assert_eq!(set.len(), HEADER + 88);
        assert_eq!(parsed(&request(1, b"disk\0")), Ok(Operation::Lookup(b"disk")));
        assert_eq!(parsed(&request(9999, b"")), Ok(Operation::Other));
    }

    #[test]
    fn an_old_kernel_has_no_second_word_of_flags() {
        let old = numbers(&[(7, 4), (31, 4), (1 << 17, 4), (1, 4)]);
        let init = |flags| Init { major: 7, minor: 31, max_readahead: 1 << 17, flags };
        assert_eq!(parsed(&request(26, &old)), Ok(Operation::Init(init(1))));
        let new = numbers(&[(7, 4), (31, 4), (1 << 17, 4), (1 << 30, 4), (16, 4)]);
        let flags = 1 << 30 | 16 << 32;
        assert_eq!(parsed(&request(26, &new)), Ok(Operation::Init(init(flags))));
    }

    #[test]
    fn what_is_too_short_or_of_another_length_is_refused() {
        for opcode in [1, 4, 14, 15, 16, 26, 28, 36, 43, 46] {
            let malformed = parsed(&request(opcode, b"")).unwrap_err();
            let bytes = request(opcode, b"");
            assert_eq!(malformed.unique, Some(77), "{opcode}");
            assert_eq!(parsed(&bytes[..HEADER - 1]).unwrap_err().unique, None);
            assert!(KernelRequest::parse(&bytes, bytes.len() + 1).is_err());
        }
        for name in [&b"disk"[..], b"\0", b"a\0b\0", &[b'x'; 5000]] {
            assert!(parsed(&request(1, name)).is_err(), "{name:?}");
        }
        let write = numbers(&[(9, 8), (7, 8), (4, 4), (1, 4), (5, 8), (0, 4), (0, 4)]);
        assert!(parsed(&request(16, &write)).is_err(), "data is missing");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_accept_what_does_not_fit(
            opcode in 0_u32..60,
            arguments in prop::collection::vec(any::<u8>(), 0..200),
            cut in 0_usize..240,
        ) {
            let bytes = request(opcode, &arguments);
            let kept = &bytes[..cut.min(bytes.len())];
            if let Ok(request) = KernelRequest::parse(kept, bytes.len()) {
                prop_assert!(kept.len() >= HEADER);
                if let Operation::Write { len, .. } = request.operation {
                    prop_assert_eq!(bytes.len(), WRITE_HEADER + len as usize);
                }
            }
            prop_assert!(KernelRequest::parse(kept, kept.len() + 1).is_err() || cut + 1 == bytes.len());
        }

        #[test]
        fn random_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let result = KernelRequest::parse(&bytes, bytes.len());
            let says = bytes.first_chunk().map(|len| u32::from_ne_bytes(*len) as usize);
            prop_assert!(result.is_err() || says == Some(bytes.len()));
        }
    }
}
