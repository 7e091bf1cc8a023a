//! The messages of vhost-user, without I/O ("Vhost-user Protocol" in QEMU's documentation). Numbers
//! are in the byte order of the machine: both ends are on it.

use bitflags::bitflags;

/// Length of the header of a message in bytes.
pub const HEADER: usize = 12;
/// Maximum length of a payload in bytes: that of the largest message, a table of memory regions.
pub const PAYLOAD_MAX: usize = 4096;
/// Maximum number of descriptors in a message: one for each region of a table.
pub const FDS_MAX: usize = 32;
/// Size of the configuration that messages may ask for, in bytes.
pub const CONFIG_MAX: usize = 256;

/// The version of the protocol, in the flags of each header.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// The back end's message that the configuration has changed.
const CONFIG_CHANGED: u32 = 2;
/// Flag beside the number of a queue: no descriptor comes with the message.
const NO_FD: u64 = 1 << 8;
/// Size of a memory region in messages, in bytes.
const REGION: usize = 32;

bitflags! {
    /// Optional parts of the protocol.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ProtocolFeatures: u64 {
        /// More than one queue.
        const QUEUES = 1 << 0;
        /// Any message may ask for a reply.
        const REPLY_ACK = 1 << 3;
        /// Messages of the back end.
        const BACKEND_REQUESTS = 1 << 5;
        /// The configuration of the device.
        const CONFIG = 1 << 9;
        /// A table of requests in flight that outlives the back end.
        const IN_FLIGHT = 1 << 12;
        /// Memory regions are added and removed one by one.
        const MEMORY_SLOTS = 1 << 15;
    }
}

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageHeader {
    /// Number of the request.
    pub request: u32,
    /// Whether the sender wants a reply, where that is optional.
    pub need_reply: bool,
    /// Length of the payload in bytes, at most [`PAYLOAD_MAX`].
    pub len: usize,
}

/// Why a message cannot be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MalformedMessage {
    /// Another version of the protocol.
    Version(u32),
    /// A reply instead of a request.
    Reply,
    /// A payload that is too long.
    TooLong(u32),
    /// A payload that does not fit the request.
    Payload(u32),
    /// A request that is not known, or was not offered.
    Unknown(u32),
}

impl std::fmt::Display for MalformedMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MalformedMessage::Version(version) => write!(f, "version {version} of vhost-user"),
            MalformedMessage::Reply => f.write_str("a reply to no request"),
            MalformedMessage::TooLong(len) => write!(f, "a message of {len} bytes"),
            MalformedMessage::Payload(request) => {
                write!(f, "message {request} with a wrong payload")
            }
            MalformedMessage::Unknown(request) => {
                write!(f, "message {request}, which is not supported")
            }
        }
    }
}

impl std::error::Error for MalformedMessage {}

/// A range of the guest's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Where it begins for the guest.
    pub guest: u64,
    /// Its length.
    pub len: u64,
    /// Where it begins in the front end.
    pub user: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

/// Where the parts of a ring are, as addresses in the front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingAddress {
    /// The descriptors.
    pub descriptors: u64,
    /// What the device has done.
    pub used: u64,
    /// What the driver asks for.
    pub available: u64,
}

/// A table of requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFlightRegion {
    /// Its length in bytes.
    pub len: u64,
    /// Where it begins in its file.
    pub offset: u64,
    /// Number of queues in it.
    pub queues: u16,
    /// Size of each queue.
    pub queue_size: u16,
    /// Length of this payload in bytes: front ends differ, and want the same in the reply.
    pub payload: usize,
}

/// A message of the front end.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the specification")]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemory(Vec<Region>),
    SetRingSize { queue: u32, size: u32 },
    SetRingAddress { queue: u32, address: RingAddress },
    SetRingBase { queue: u32, base: u32 },
    GetRingBase { queue: u32 },
    SetRingKick { queue: u32, has_fd: bool },
    SetRingCall { queue: u32, has_fd: bool },
    SetRingError { queue: u32, has_fd: bool },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNumber,
    EnableRing { queue: u32, enabled: bool },
    SetBackendSocket,
    GetConfig { offset: u32, len: u32, flags: u32 },
    SetConfig,
    GetInFlight(InFlightRegion),
    SetInFlight(InFlightRegion),
    GetMemorySlots,
    AddMemory(Region),
    RemoveMemory(Region),
}

impl MessageHeader {
    /// Reads a header.
    ///
    /// # Errors
    /// If it is not one of a request of this version, or announces too much.
    pub fn parse(bytes: &[u8; HEADER]) -> Result<MessageHeader, MalformedMessage> {
        let mut words = bytes.chunks_exact(4).map(number);
        let mut next = || words.next().unwrap_or(0);
        let request = next();
        let flags = next();
        let len = next();
        if flags & VERSION_MASK != VERSION {
            return Err(MalformedMessage::Version(flags & VERSION_MASK));
        }
        if flags & REPLY != 0 {
            return Err(MalformedMessage::Reply);
        }
        match usize::try_from(len) {
            Ok(payload) if payload <= PAYLOAD_MAX => {
                Ok(MessageHeader { request, need_reply: flags & NEED_REPLY != 0, len: payload })
            }
            _ => Err(MalformedMessage::TooLong(len)),
        }
    }
}

impl Message {
    /// Reads the payload of a message.
    ///
    /// # Errors
    /// If the request is not known, or the payload does not fit it.
    pub fn parse(header: MessageHeader, payload: &[u8]) -> Result<Message, MalformedMessage> {
        let mut rest = Payload(payload);
        let message = rest.message(header).ok_or(MalformedMessage::Payload(header.request))??;
        if rest.0.is_empty() { Ok(message) } else { Err(MalformedMessage::Payload(header.request)) }
    }

    /// Whether the message has a reply of its own; all others are acknowledged if asked for.
    pub fn has_reply(&self) -> bool {
        matches!(
            self,
            Message::GetFeatures
                | Message::GetRingBase { .. }
                | Message::GetProtocolFeatures
                | Message::GetQueueNumber
                | Message::GetConfig { .. }
                | Message::GetInFlight(_)
                | Message::GetMemorySlots
        )
    }
}

/// The rest of a payload.
struct Payload<'a>(&'a [u8]);

impl Payload<'_> {
    fn u16(&mut self) -> Option<u16> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_ne_bytes(*first))
    }

    fn u32(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*first))
    }

    fn u64(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*first))
    }

    fn region(&mut self) -> Option<Region> {
        let guest = self.u64()?;
        let len = self.u64()?;
        let user = self.u64()?;
        let offset = self.u64()?;
        Some(Region { guest, len, user, offset })
    }

    fn regions(&mut self) -> Option<Vec<Region>> {
        let count = self.u32()? as usize;
        let _padding = self.u32()?;
        if count > FDS_MAX || self.0.len() < count * REGION {
            return None;
        }
        let regions = (0..count).map(|_| self.region()).collect();
        // The table may have room for more.
        self.0 = &[];
        regions
    }

    fn one_region(&mut self) -> Option<Region> {
        let _padding = self.u64()?;
        self.region()
    }

    fn address(&mut self) -> Option<Message> {
        let queue = self.u32()?;
        let _flags = self.u32()?;
        let descriptors = self.u64()?;
        let used = self.u64()?;
        let available = self.u64()?;
        let _log = self.u64()?;
        Some(Message::SetRingAddress {
            queue,
            address: RingAddress { descriptors, used, available },
        })
    }

    /// The number of a queue, and whether a descriptor comes with it.
    fn queue(&mut self) -> Option<(u32, bool)> {
        let value = self.u64()?;
        Some((u32::try_from(value & 0xff).ok()?, value & NO_FD == 0))
    }

    fn table(&mut self) -> Option<InFlightRegion> {
        let payload = self.0.len();
        let table = InFlightRegion {
            len: self.u64()?,
            offset: self.u64()?,
            queues: self.u16()?,
            queue_size: self.u16()?,
            payload,
        };
        // Some front ends add padding.
        self.0 = &[];
        Some(table)
    }

    fn config(&mut self) -> Option<(u32, u32, u32)> {
        let config = (self.u32()?, self.u32()?, self.u32()?);
        self.0 = &[];
        Some(config)
    }

    /// `None`: the payload is too short.
    fn message(&mut self, header: MessageHeader) -> Option<Result<Message, MalformedMessage>> {
        Some(Ok(match header.request {
            1 => Message::GetFeatures,
            2 => Message::SetFeatures(self.u64()?),
            3 => Message::SetOwner,
            4 => Message::ResetOwner,
            5 => Message::SetMemory(self.regions()?),
            8 => Message::SetRingSize { queue: self.u32()?, size: self.u32()? },
            9 => self.address()?,
            10 => Message::SetRingBase { queue: self.u32()?, base: self.u32()? },
            11 => {
                let queue = self.u32()?;
                let _ = self.u32()?;
                Message::GetRingBase { queue }
            }
            12 => self.queue().map(|(queue, has_fd)| Message::SetRingKick { queue, has_fd })?,
            13 => self.queue().map(|(queue, has_fd)| Message::SetRingCall { queue, has_fd })?,
            14 => self.queue().map(|(queue, has_fd)| Message::SetRingError { queue, has_fd })?,
            15 => Message::GetProtocolFeatures,
            16 => Message::SetProtocolFeatures(self.u64()?),
            17 => Message::GetQueueNumber,
            18 => Message::EnableRing { queue: self.u32()?, enabled: self.u32()? != 0 },
            21 => Message::SetBackendSocket,
            24 => {
                let (offset, len, flags) = self.config()?;
                Message::GetConfig { offset, len, flags }
            }
            25 => self.config().map(|_| Message::SetConfig)?,
            31 => Message::GetInFlight(self.table()?),
            32 => Message::SetInFlight(self.table()?),
            36 => Message::GetMemorySlots,
            37 => Message::AddMemory(self.one_region()?),
            38 => Message::RemoveMemory(self.one_region()?),
            request => return Some(Err(MalformedMessage::Unknown(request))),
        }))
    }
}

/// A native number of at most 4 bytes.
fn number(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

fn framed(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).expect("payloads are short");
    let words = [request, VERSION | flags, len];
    words.iter().flat_map(|word| word.to_ne_bytes()).chain(payload.iter().copied()).collect()
}

/// A reply with this payload.
pub fn reply(to: MessageHeader, payload: &[u8]) -> Vec<u8> {
    framed(to.request, REPLY, payload)
}

/// A reply with one number; as an acknowledgement, 0 means success.
pub fn reply_number(to: MessageHeader, number: u64) -> Vec<u8> {
    reply(to, &number.to_ne_bytes())
}

/// The reply to [`Message::GetRingBase`].
pub fn reply_base(to: MessageHeader, queue: u32, base: u16) -> Vec<u8> {
    reply(to, &[queue.to_ne_bytes(), u32::from(base).to_ne_bytes()].concat())
}

/// The reply to [`Message::GetConfig`]: without bytes, it was refused.
pub fn reply_config(to: MessageHeader, offset: u32, flags: u32, bytes: &[u8]) -> Vec<u8> {
    let len = u32::try_from(bytes.len()).expect("the configuration is short");
    let words = [offset, len, flags].map(u32::to_ne_bytes);
    if bytes.is_empty() { reply(to, &[]) } else { reply(to, &[&words.concat(), bytes].concat()) }
}

/// The reply to [`Message::GetInFlight`].
pub fn reply_table(to: MessageHeader, table: &InFlightRegion) -> Vec<u8> {
    let mut payload = [table.len.to_ne_bytes(), table.offset.to_ne_bytes()].concat();
    payload.extend(table.queues.to_ne_bytes());
    payload.extend(table.queue_size.to_ne_bytes());
    payload.resize(table.payload.min(PAYLOAD_MAX).max(payload.len()), 0);
    reply(to, &payload)
}

/// The message that the configuration has changed, for the front end.
pub fn config_changed() -> Vec<u8> {
    framed(CONFIG_CHANGED, 0, &[])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn header(request: u32, len: usize) -> MessageHeader {
        MessageHeader { request, need_reply: false, len }
    }

    #[test]
    fn headers_of_other_versions_replies_and_long_messages_are_refused() {
        let parse = |flags: u32, len: u32| {
            let words = [1, flags, len].map(u32::to_ne_bytes);
            MessageHeader::parse(words.concat().as_slice().try_into().unwrap())
        };
        assert_eq!(parse(1, 8), Ok(header(1, 8)));
        assert_eq!(parse(9, 8), Ok(MessageHeader { need_reply: true, ..header(1, 8) }));
        assert_eq!(parse(2, 8), Err(MalformedMessage::Version(2)));
        assert_eq!(parse(5, 8), Err(MalformedMessage::Reply));
        assert_eq!(parse(1, 4097), Err(MalformedMessage::TooLong(4097)));
    }

    #[test]
    fn payloads_have_the_length_of_their_request() {
        let parse = |request, len: usize| Message::parse(header(request, len), &vec![0; len]);
        assert_eq!(parse(1, 0), Ok(Message::GetFeatures));
        assert_eq!(parse(1, 8), Err(MalformedMessage::Payload(1)));
        assert_eq!(parse(2, 8), Ok(Message::SetFeatures(0)));
        assert_eq!(parse(2, 7), Err(MalformedMessage::Payload(2)));
        assert_eq!(parse(99, 0), Err(MalformedMessage::Unknown(99)));
        let table = InFlightRegion { len: 0, offset: 0, queues: 0, queue_size: 0, payload: 24 };
        assert_eq!(parse(31, 24), Ok(Message::GetInFlight(table)));
        assert_eq!(reply_table(header(31, 24), &table).len(), HEADER + 24);
    }

    #[test]
    fn a_table_of_memory_has_the_regions_that_it_announces() {
        let words: Vec<u64> = vec![2, 1, 2, 3, 4, 5, 6, 7, 8];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let parse = |bytes: &[u8]| Message::parse(header(5, bytes.len()), bytes);
        let first = Region { guest: 1, len: 2, user: 3, offset: 4 };
        let second = Region { guest: 5, len: 6, user: 7, offset: 8 };
        assert_eq!(parse(&bytes), Ok(Message::SetMemory(vec![first, second])));
        assert_eq!(parse(&bytes[..71]), Err(MalformedMessage::Payload(5)));
        let many = 33_u64.to_ne_bytes().repeat(200);
        assert_eq!(parse(&many), Err(MalformedMessage::Payload(5)));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(
            request in 0_u32..45,
            payload in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..1200),
        ) {
            let _ = Message::parse(header(request, payload.len()), &payload);
        }
    }
}
