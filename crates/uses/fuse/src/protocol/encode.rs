//! Replies to the kernel.

use std::time::Duration;

use super::numbers::{KernelErrno, MAJOR, MINOR, REPLY_HEADER};

/// The header of a reply with a body of `body` bytes, or of an error, which has none.
pub fn reply_header(unique: u64, result: Result<usize, KernelErrno>) -> [u8; REPLY_HEADER] {
    let (body, error) = match result {
        Ok(body) => (body, 0),
        Err(errno) => (0, -errno.number()),
    };
    // Bodies are at most a few MiB.
    let len = u32::try_from(REPLY_HEADER + body).unwrap_or(u32::MAX);
    let mut bytes = [0; REPLY_HEADER];
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..8].copy_from_slice(&error.to_ne_bytes());
    bytes[8..].copy_from_slice(&unique.to_ne_bytes());
    bytes
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeKind {
    /// A regular file.
    File,
    /// A directory.
    Folder,
}

impl NodeKind {
    /// The kind among the bits of a mode.
    fn mode(self) -> u32 {
        match self {
            NodeKind::File => 0o100_000,
            NodeKind::Folder => 0o040_000,
        }
    }
}

/// Attributes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// Its node.
    pub node: u64,
    /// What it is.
    pub kind: NodeKind,
    /// Permissions, nine bits.
    pub permissions: u32,
    /// Size in bytes.
    pub size: u64,
    /// Allocated units of 512 bytes.
    pub blocks: u64,
    /// Preferred length of requests in bytes.
    pub block_size: u32,
    /// All times, since 1970.
    pub time: Duration,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// How long the kernel may use these.
    pub valid: Duration,
}

impl Attr {
    fn put(&self, out: &mut Vec<u8>) {
        for number in [self.node, self.size, self.blocks] {
            out.extend(number.to_ne_bytes());
        }
        for _ in 0..3 {
            out.extend(self.time.as_secs().to_ne_bytes());
        }
        for _ in 0..3 {
            out.extend(self.time.subsec_nanos().to_ne_bytes());
        }
        let links = if self.kind == NodeKind::Folder { 2_u32 } else { 1 };
        let device = 0;
        let flags = 0;
        let mode = self.kind.mode() | self.permissions;
        for number in [mode, links, self.uid, self.gid, device, self.block_size, flags] {
            out.extend(number.to_ne_bytes());
        }
    }
}

/// The body of a reply to LOOKUP.
pub fn entry(found: &Attr) -> Vec<u8> {
    let generation = 0;
    let mut out = Vec::new();
    for number in [found.node, generation, found.valid.as_secs(), found.valid.as_secs()] {
        out.extend(number.to_ne_bytes());
    }
    for _ in 0..2 {
        out.extend(found.valid.subsec_nanos().to_ne_bytes());
    }
    found.put(&mut out);
    out
}

/// The body of a reply to GETATTR and SETATTR.
pub fn attr(found: &Attr) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend(found.valid.as_secs().to_ne_bytes());
    out.extend(found.valid.subsec_nanos().to_ne_bytes());
    out.extend([0; 4]);
    found.put(&mut out);
    out
}

/// What this server answers to INIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitReply {
    /// Maximum bytes that the kernel reads ahead.
    pub max_readahead: u32,
    /// What is used ([`super::numbers::init_flags`]): only what the kernel offers.
    pub flags: u64,
    /// Maximum number of requests in flight that nobody waits for: reading ahead, asynchronous I/O.
    pub max_background: u16,
    /// Maximum data of a write in bytes.
    pub max_write: u32,
    /// Maximum pages of a request.
    pub max_pages: u16,
}

/// The body of a reply to INIT.
pub fn init(reply: &InitReply) -> Vec<u8> {
    let mut out = Vec::new();
    // The lower and the upper word.
    let flags = [reply.flags & 0xffff_ffff, reply.flags >> 32];
    let [low, high] = flags.map(|word| u32::try_from(word).unwrap_or(0));
    for number in [MAJOR, MINOR, reply.max_readahead, low] {
        out.extend(number.to_ne_bytes());
    }
    let congested = reply.max_background - reply.max_background / 4;
    for number in [reply.max_background, congested] {
        out.extend(number.to_ne_bytes());
    }
    let nanoseconds = 1_u32;
    out.extend(reply.max_write.to_ne_bytes());
    out.extend(nanoseconds.to_ne_bytes());
    out.extend(reply.max_pages.to_ne_bytes());
    out.extend([0; 2]);
    out.extend(high.to_ne_bytes());
    out.extend([0; 28]);
    out
}

/// The body of a reply to an INIT of a newer major version: the kernel sends another one then.
pub fn init_version() -> Vec<u8> {
    let mut out = vec![0; 64];
    out[..4].copy_from_slice(&MAJOR.to_ne_bytes());
    out[4..8].copy_from_slice(&MINOR.to_ne_bytes());
    out
}

/// The body of a reply to OPEN and OPENDIR, with [`super::numbers::open_flags`].
pub fn opened(flags: u32) -> [u8; 16] {
    let mut out = [0; 16];
    out[8..12].copy_from_slice(&flags.to_ne_bytes());
    out
}

/// The body of a reply to WRITE.
pub fn written(len: u32) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&len.to_ne_bytes());
    out
}

/// The body of a reply to LSEEK.
pub fn position(at: u64) -> [u8; 8] {
    at.to_ne_bytes()
}

/// Facts of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statfs {
    /// Blocks, all of them used.
    pub blocks: u64,
    /// Size of a block in bytes.
    pub block_size: u32,
    /// Number of files.
    pub files: u64,
    /// Maximum length of a name in bytes.
    pub name_max: u32,
}

/// The body of a reply to STATFS.
pub fn statfs(facts: &Statfs) -> Vec<u8> {
    let mut out = Vec::new();
    let free = 0;
    let available = 0;
    let free_files = 0;
    for number in [facts.blocks, free, available, facts.files, free_files] {
        out.extend(number.to_ne_bytes());
    }
    for number in [facts.block_size, facts.name_max, facts.block_size] {
        out.extend(number.to_ne_bytes());
    }
    out.extend([0; 28]);
    out
}

/// The body of a reply to READDIR: as many entries as fit.
pub struct DirEntries {
    out: Vec<u8>,
    most: usize,
}

impl DirEntries {
    /// No entries yet, of at most `most` bytes.
    pub fn new(most: u32) -> DirEntries {
        DirEntries { out: Vec::new(), most: usize::try_from(most).unwrap_or(usize::MAX) }
    }

    /// Adds an entry; the next one is found at `next`. False: it does not fit.
    pub fn add(&mut self, node: u64, next: u64, kind: NodeKind, name: &str) -> bool {
        let mut one = Vec::new();
        one.extend(node.to_ne_bytes());
        one.extend(next.to_ne_bytes());
        one.extend(u32::try_from(name.len()).unwrap_or(u32::MAX).to_ne_bytes());
        one.extend((kind.mode() >> 12).to_ne_bytes());
        one.extend(name.as_bytes());
        one.resize(one.len().next_multiple_of(8), 0);
        let fits = self.out.len() + one.len() <= self.most;
        if fits {
            self.out.append(&mut one);
        }
        fits
    }

    /// The body.
    pub fn into_bytes(self) -> Vec<u8> {
        self.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUND: Attr = Attr {
        node: 2,
        kind: NodeKind::File,
        permissions: 0o600,
        size: 1000,
        blocks: 1,
        block_size: 4096,
        time: Duration::from_secs(5),
        uid: 10,
        gid: 20,
        valid: Duration::from_millis(1500),
    };

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
    }

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
    }

    #[test]
    fn bodies_have_the_lengths_and_places_of_the_kernels_structures() {
        let body = attr(&FOUND);
        assert_eq!(body.len(), 16 + 88);
        assert_eq!((u64_at(&body, 0), u32_at(&body, 8)), (1, 500_000_000));
        assert_eq!((u64_at(&body, 16), u64_at(&body, 24)), (2, 1000));
        assert_eq!(u32_at(&body, 16 + 60), 0o100_600, "mode");
        assert_eq!((u32_at(&body, 16 + 68), u32_at(&body, 16 + 72)), (10, 20), "owner");
        let body = entry(&FOUND);
        assert_eq!(body.len(), 40 + 88);
        assert_eq!((u64_at(&body, 0), u64_at(&body, 40), u64_at(&body, 48)), (2, 2, 1000));
        let facts = Statfs { blocks: 3, block_size: 4096, files: 2, name_max: 255 };
        assert_eq!(statfs(&facts).len(), 80);
        assert_eq!(u32_at(&statfs(&facts), 44), 255);
        assert_eq!(u32_at(&opened(5), 8), 5);
    }

    #[test]
    fn an_answer_to_init_has_both_words_of_flags() {
        let reply = InitReply {
            max_readahead: 4096,
            flags: 1 | 1 << 36,
            max_background: 64,
            max_write: 1 << 20,
            max_pages: 256,
        };
        let body = init(&reply);
        assert_eq!(body.len(), 64);
        assert_eq!((u32_at(&body, 0), u32_at(&body, 12), u32_at(&body, 32)), (7, 1, 16));
        assert_eq!((u32_at(&body, 16), u32_at(&body, 20)), (64 | 48 << 16, 1 << 20));
        assert_eq!(u32_at(&body, 28) & 0xffff, 256);
        assert_eq!(init_version().len(), 64);
    }

    #[test]
    fn headers_have_the_length_of_the_reply_or_a_negative_error() {
        let header = reply_header(7, Ok(8));
        assert_eq!((u32_at(&header, 0), u32_at(&header, 4), u64_at(&header, 8)), (24, 0, 7));
        let header = reply_header(7, Err(KernelErrno::IO));
        assert_eq!((u32_at(&header, 0), u32_at(&header, 4).cast_signed()), (16, -5));
    }

    #[test]
    fn entries_are_aligned_and_end_where_the_room_ends() {
        let mut entries = DirEntries::new(70);
        assert!(entries.add(1, 1, NodeKind::Folder, "."));
        assert!(entries.add(2, 2, NodeKind::File, "disk"));
        assert!(!entries.add(3, 3, NodeKind::File, "info.json"));
        let bytes = entries.into_bytes();
        assert_eq!(bytes.len(), 64);
        assert_eq!((u32_at(&bytes, 20), u32_at(&bytes, 32 + 16)), (4, 4), "type, length of name");
        assert_eq!(u32_at(&bytes, 32 + 20), 8);
    }
}
