//! Every bound on what a peer may ask of us, each with its reason.

/// Longest string of the protocol in bytes: export names, context names, descriptions, error texts.
/// The document's own bound ("Conventions").
pub const STRING: usize = 4096;

/// Longest payload of one option that a server reads into memory, in bytes. A context option with an
/// export name and [`QUERIES`] queries of the longest kind needs more, but no client in use sends
/// more than a few short queries; longer ones are skipped and answered TOO_BIG.
pub const OPTION_PAYLOAD: usize = 128 * 1024;

/// Longest payload of an option that a server skips instead of ending the session, in bytes. A peer
/// that sends more is not negotiating.
pub const OPTION_SKIP: u32 = 1024 * 1024;

/// Options a client may send in one handshake. nbdkit's bound is 32; an information tool needs
/// about ten, and [`OPTIONS_PER_EXPORT`] more for each export it was told of.
pub const OPTIONS: u32 = 64;

/// Options added to [`OPTIONS`] for each export that LIST named: an information tool asks two to
/// four options about each.
pub const OPTIONS_PER_EXPORT: u32 = 8;

/// Queries in one context option. Above: TOO_BIG.
pub const QUERIES: usize = 64;

/// Contexts that one session may select. Each costs a chunk in every block status reply.
pub const CONTEXTS: usize = 64;

/// Longest payload of one reply to an option that a client reads, in bytes. A name and a description
/// need 8 KiB; the rest is room for a server's long error text or an unknown information item.
pub const OPTION_REPLY: usize = 64 * 1024;

/// Exports that a client takes from one LIST (nbdkit's bound, too).
pub const EXPORTS: usize = 10_000;

/// Names and descriptions that a client takes from one LIST, in bytes together.
pub const LIST_BYTES: usize = 16 * 1024 * 1024;

/// Information replies that a client takes for one INFO or GO; the document defines four kinds and
/// says that each should come once.
pub const INFOS: usize = 64;

/// Contexts that a client takes from one LIST_META_CONTEXT: an image may have many dirty bitmaps.
pub const CONTEXTS_LISTED: usize = 1024;

/// Payload that every peer is expected to take in one request, in bytes, and the default maximum
/// ("Size constraints": 2^25).
pub const PAYLOAD: u32 = 32 * 1024 * 1024;

/// Payload that nobody needs to exceed, in bytes: nbdkit's and libnbd's largest request. A write
/// above it, or a chunk of data above it, ends the connection.
pub const PAYLOAD_HARD: u32 = 64 * 1024 * 1024;

/// Extents in one block status chunk ("NBD_REPLY_TYPE_BLOCK_STATUS": servers should not send more).
pub const EXTENTS: usize = 1 << 20;

/// Longest payload of an error chunk in bytes: a text's length has 16 bits, and the chunk's fixed
/// parts and whatever an unknown kind adds at its end get as much again.
pub const ERROR_PAYLOAD: u32 = 128 * 1024;

/// Longest text of a server's error that is kept and shown, in bytes after escaping.
pub const ERROR_TEXT: usize = 1024;

/// Longest URI that is parsed, in bytes: two paths of the longest kind and an export name, escaped.
pub const URI: usize = 64 * 1024;
