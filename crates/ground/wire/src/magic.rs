//! The protocol's magic numbers and codes, with the document's names without their `NBD_` prefix.
//!
//! Flags are in [`crate::flags`], error numbers in [`crate::errno`].

/// First eight bytes a server sends, `NBDMAGIC`.
pub const INIT_PASSWD: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes of an oldstyle server (`cliserv_magic`).
pub const CLISERV: u64 = 0x0000_4202_8186_1253;
/// Second eight bytes of a newstyle server, and first eight of every option: `IHAVEOPT`.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// First eight bytes of every reply to an option.
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;

/// First four bytes of a request of 28 bytes.
pub const REQUEST: u32 = 0x2560_9513;
/// First four bytes of a request of 32 bytes (EXTENDED_HEADERS).
pub const EXTENDED_REQUEST: u32 = 0x21e4_1c71;
/// First four bytes of a simple reply of 16 bytes.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// First four bytes of a structured reply chunk of 20 bytes.
pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;
/// First four bytes of a reply chunk of 32 bytes (EXTENDED_HEADERS).
pub const EXTENDED_REPLY: u32 = 0x6e8a_278c;

/// TCP port of NBD, from IANA.
pub const PORT: u16 = 10809;

/// Zero bytes after an oldstyle greeting, and after the reply to EXPORT_NAME without NO_ZEROES.
pub const RESERVED_ZEROES: usize = 124;

/// `NBD_CMD_READ`.
pub const CMD_READ: u16 = 0;
/// `NBD_CMD_WRITE`.
pub const CMD_WRITE: u16 = 1;
/// `NBD_CMD_DISC`.
pub const CMD_DISC: u16 = 2;
/// `NBD_CMD_FLUSH`.
pub const CMD_FLUSH: u16 = 3;
/// `NBD_CMD_TRIM`.
pub const CMD_TRIM: u16 = 4;
/// `NBD_CMD_CACHE`.
pub const CMD_CACHE: u16 = 5;
/// `NBD_CMD_WRITE_ZEROES`.
pub const CMD_WRITE_ZEROES: u16 = 6;
/// `NBD_CMD_BLOCK_STATUS`.
pub const CMD_BLOCK_STATUS: u16 = 7;
/// `NBD_CMD_RESIZE`: reserved by the document for an unused experiment. Never offered.
pub const CMD_RESIZE: u16 = 8;

/// `NBD_REPLY_TYPE_NONE`.
pub const REPLY_NONE: u16 = 0;
/// `NBD_REPLY_TYPE_OFFSET_DATA`.
pub const REPLY_OFFSET_DATA: u16 = 1;
/// `NBD_REPLY_TYPE_OFFSET_HOLE`.
pub const REPLY_OFFSET_HOLE: u16 = 2;
/// `NBD_REPLY_TYPE_BLOCK_STATUS`.
pub const REPLY_BLOCK_STATUS: u16 = 5;
/// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT` (EXTENDED_HEADERS).
pub const REPLY_BLOCK_STATUS_EXT: u16 = 6;
/// Bit of all error chunks.
pub const REPLY_ERROR_BIT: u16 = 1 << 15;
/// `NBD_REPLY_TYPE_ERROR`.
pub const REPLY_ERROR: u16 = REPLY_ERROR_BIT | 1;
/// `NBD_REPLY_TYPE_ERROR_OFFSET`.
pub const REPLY_ERROR_OFFSET: u16 = REPLY_ERROR_BIT | 2;

/// `NBD_OPT_EXPORT_NAME`.
pub const OPT_EXPORT_NAME: u32 = 1;
/// `NBD_OPT_ABORT`.
pub const OPT_ABORT: u32 = 2;
/// `NBD_OPT_LIST`.
pub const OPT_LIST: u32 = 3;
/// `NBD_OPT_PEEK_EXPORT`: withdrawn by the document, not in use.
pub const OPT_PEEK_EXPORT: u32 = 4;
/// `NBD_OPT_STARTTLS`.
pub const OPT_STARTTLS: u32 = 5;
/// `NBD_OPT_INFO`.
pub const OPT_INFO: u32 = 6;
/// `NBD_OPT_GO`.
pub const OPT_GO: u32 = 7;
/// `NBD_OPT_STRUCTURED_REPLY`.
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// `NBD_OPT_LIST_META_CONTEXT`.
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// `NBD_OPT_SET_META_CONTEXT`.
pub const OPT_SET_META_CONTEXT: u32 = 10;
/// `NBD_OPT_EXTENDED_HEADERS` (EXTENDED_HEADERS).
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// `NBD_REP_ACK`.
pub const REP_ACK: u32 = 1;
/// `NBD_REP_SERVER`.
pub const REP_SERVER: u32 = 2;
/// `NBD_REP_INFO`.
pub const REP_INFO: u32 = 3;
/// `NBD_REP_META_CONTEXT`.
pub const REP_META_CONTEXT: u32 = 4;
/// Bit of all errors among the replies to options.
pub const REP_ERROR_BIT: u32 = 1 << 31;
/// `NBD_REP_ERR_UNSUP`.
pub const REP_ERR_UNSUP: u32 = REP_ERROR_BIT | 1;
/// `NBD_REP_ERR_POLICY`.
pub const REP_ERR_POLICY: u32 = REP_ERROR_BIT | 2;
/// `NBD_REP_ERR_INVALID`.
pub const REP_ERR_INVALID: u32 = REP_ERROR_BIT | 3;
/// `NBD_REP_ERR_PLATFORM`.
pub const REP_ERR_PLATFORM: u32 = REP_ERROR_BIT | 4;
/// `NBD_REP_ERR_TLS_REQD`.
pub const REP_ERR_TLS_REQD: u32 = REP_ERROR_BIT | 5;
/// `NBD_REP_ERR_UNKNOWN`.
pub const REP_ERR_UNKNOWN: u32 = REP_ERROR_BIT | 6;
/// `NBD_REP_ERR_SHUTDOWN`.
pub const REP_ERR_SHUTDOWN: u32 = REP_ERROR_BIT | 7;
/// `NBD_REP_ERR_BLOCK_SIZE_REQD`.
pub const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_ERROR_BIT | 8;
/// `NBD_REP_ERR_TOO_BIG`.
pub const REP_ERR_TOO_BIG: u32 = REP_ERROR_BIT | 9;
/// `NBD_REP_ERR_EXT_HEADER_REQD` (EXTENDED_HEADERS).
pub const REP_ERR_EXT_HEADER_REQD: u32 = REP_ERROR_BIT | 10;

/// `NBD_INFO_EXPORT`.
pub const INFO_EXPORT: u16 = 0;
/// `NBD_INFO_NAME`.
pub const INFO_NAME: u16 = 1;
/// `NBD_INFO_DESCRIPTION`.
pub const INFO_DESCRIPTION: u16 = 2;
/// `NBD_INFO_BLOCK_SIZE`.
pub const INFO_BLOCK_SIZE: u16 = 3;
