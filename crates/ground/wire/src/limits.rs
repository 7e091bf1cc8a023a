//! All limits for a peer's requests, each with its reason.

/// Maximum length of a string of the protocol in bytes: export names, context names, descriptions,
/// error texts. The document's own limit ("Conventions").
pub const STRING: usize = 4096;

/// Maximum payload of one option that a server reads into memory, in bytes. A context option with
/// an export name and [`QUERIES`] queries of maximum length needs more, but common clients send
/// only a few short queries; longer ones are skipped and answered TOO_BIG.
pub const OPTION_PAYLOAD: usize = 128 * 1024;

/// Maximum payload of an option that a server skips instead of ending the session, in bytes. A peer
/// that sends more is not negotiating.
pub const OPTION_SKIP: u32 = 1024 * 1024;

/// Options that a client may send in one handshake. nbdkit's limit is 32; an information tool needs
/// about ten, and [`OPTIONS_PER_EXPORT`] more for each listed export.
pub const OPTIONS: u32 = 64;

/// Options added to [`OPTIONS`] for each export in a LIST reply: an information tool sends two to
/// four for each.
pub const OPTIONS_PER_EXPORT: u32 = 8;

/// Queries in one context option. Above: TOO_BIG.
pub const QUERIES: usize = 64;

/// Contexts that one session may select. Each costs a chunk in every block status reply.
pub const CONTEXTS: usize = 64;

/// Maximum payload of one option reply that a client reads, in bytes. A name and a description need
/// 8 KiB; the rest allows for a server's long error text or an unknown information item.
pub const OPTION_REPLY: usize = 64 * 1024;

/// Exports that a client accepts from one LIST (nbdkit's limit, too).
pub const EXPORTS: usize = 10_000;

/// Names and descriptions that a client accepts from one LIST, in bytes together.
pub const LIST_BYTES: usize = 16 * 1024 * 1024;

/// Information replies that a client accepts for one INFO or GO; the document defines four kinds
/// and says that each should be sent once.
pub const INFOS: usize = 64;

/// Contexts that a client accepts from one LIST_META_CONTEXT: an image may have many dirty bitmaps.
pub const CONTEXTS_LISTED: usize = 1024;

/// Payload that every peer must accept in one request, in bytes, and the default maximum ("Size
/// constraints": 2^25).
pub const PAYLOAD: u32 = 32 * 1024 * 1024;

/// Absolute maximum payload in bytes: nbdkit's and libnbd's largest request. A larger write or
/// chunk of data ends the connection.
pub const PAYLOAD_HARD: u32 = 64 * 1024 * 1024;

/// Chunks that a client accepts in one reply: one for every 512 bytes of the longest read, and as
/// many again. Limits the lists that a server can make it keep.
pub const CHUNKS: u32 = 128 << 10;

/// Extents in one block status chunk ("NBD_REPLY_TYPE_BLOCK_STATUS": servers should not send more).
pub const EXTENTS: usize = 1 << 20;

/// Maximum payload of an error chunk in bytes: a text's length has 16 bits, and the chunk's fixed
/// parts and the additions of unknown kinds get as much again.
pub const ERROR_PAYLOAD: u32 = 128 * 1024;

/// Maximum text of a server's error that is stored and shown, in bytes after escaping.
pub const ERROR_TEXT: usize = 1024;

/// Maximum length of a URI in bytes: two paths of maximum length and an export name, escaped.
pub const URI: usize = 64 * 1024;
