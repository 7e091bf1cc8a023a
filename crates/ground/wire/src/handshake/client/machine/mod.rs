//! The state machine of the client's side: its state, and how it processes received bytes.
//! [`options`] has the options that a client sends, [`waiting`] collects the replies to them.

mod options;
mod waiting;

use self::waiting::OptionInProgress;
use super::{ClientHandshakeEvent, ClientHandshakeResult, ExportInfo};
use crate::bytes::ByteReader;
use crate::handshake::GreetingForm;
use crate::option::{BlockSizeInfo, MetaContext, OptionCode, OptionReplyHeader, ReplyCode};
use crate::text::error_text;
use crate::{
    ClientFlags, ExportFlags, HandshakeFlags, ProtocolError, ReplyForm, RequestForm, limits, magic,
    printable,
};

/// The client's side of one handshake.
#[derive(Debug, Default)]
pub struct ClientHandshake {
    protocol: Option<GreetingForm>,
    no_zeroes: bool,
    tls: bool,
    replies: ReplyForm,
    /// The contexts that the last SET_META_CONTEXT selected, and for which export.
    selected: Option<(String, Vec<MetaContext>)>,
    state: ClientHandshakeState,
}

#[derive(Debug, Default)]
enum ClientHandshakeState {
    #[default]
    Greeting,
    Idle,
    /// An option was sent, and its last reply has not arrived.
    Waiting(OptionInProgress),
    /// EXPORT_NAME was sent with this name.
    ExportName(String),
    AwaitTls,
    Over,
}

impl ClientHandshake {
    /// The longest message of a server in bytes.
    pub const MAX_MESSAGE: usize = OptionReplyHeader::LEN + limits::OPTION_REPLY;

    /// Starts a handshake; the server sends first.
    pub fn new() -> ClientHandshake {
        ClientHandshake::default()
    }

    /// The protocol of the server's greeting, once received.
    pub fn protocol(&self) -> Option<GreetingForm> {
        self.protocol
    }

    /// The form of replies that was negotiated so far.
    pub fn replies(&self) -> ReplyForm {
        self.replies
    }

    // nbd: extended.requests
    /// The form of requests that was negotiated so far.
    pub fn headers(&self) -> RequestForm {
        match self.replies {
            ReplyForm::Extended => RequestForm::Extended,
            ReplyForm::Simple | ReplyForm::Structured => RequestForm::Compact,
        }
    }

    /// Processes received bytes, from the first one that was not consumed before, and appends the
    /// bytes to send to `out`. Returns the number of bytes consumed, and the event. Bytes after the
    /// message that caused an event are not consumed.
    ///
    /// # Errors
    /// The connection must be closed.
    pub fn receive(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, ClientHandshakeEvent), ProtocolError> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            match &self.state {
                ClientHandshakeState::Greeting => return self.greeting(rest, out),
                ClientHandshakeState::Idle => {
                    return Ok((used, ClientHandshakeEvent::NeedMore { bytes: 1 }));
                }
                ClientHandshakeState::ExportName(_) => return self.export_name_reply(rest),
                ClientHandshakeState::Waiting(_) => {
                    let Some(head) = OptionReplyHeader::parse(rest)? else {
                        let bytes = OptionReplyHeader::LEN;
                        return Ok((used, ClientHandshakeEvent::NeedMore { bytes }));
                    };
                    let length = head.length as usize;
                    if length > limits::OPTION_REPLY {
                        let len = head.length.into();
                        let max = limits::OPTION_REPLY as u64;
                        return Err(ProtocolError::TooLong {
                            what: "the server's reply",
                            len,
                            max,
                        });
                    }
                    let bytes = OptionReplyHeader::LEN + length;
                    let Some(payload) = rest.get(OptionReplyHeader::LEN..bytes) else {
                        return Ok((used, ClientHandshakeEvent::NeedMore { bytes }));
                    };
                    used += bytes;
                    let event = self.reply(head, payload)?;
                    if event == Some(ClientHandshakeEvent::StartTls) && used < input.len() {
                        return Err(ProtocolError::Unexpected {
                            what: "the server sent bytes behind its answer to STARTTLS, before \
                                   TLS could be up"
                                .to_owned(),
                        });
                    }
                    if let Some(event) = event {
                        return Ok((used, event));
                    }
                }
                ClientHandshakeState::AwaitTls => {
                    return Err(ProtocolError::Caller { what: "TLS has not been started" });
                }
                ClientHandshakeState::Over => {
                    return Err(ProtocolError::Caller { what: "the handshake is over" });
                }
            }
        }
    }

    /// The server has closed the connection; `left` are bytes received and not consumed.
    ///
    /// # Errors
    /// Always one, except after [`ClientHandshake::abort`], when a server may close without a reply.
    pub fn closed(&self, left: &[u8]) -> Result<(), ProtocolError> {
        let what = match &self.state {
            ClientHandshakeState::Greeting => {
                return Err(ProtocolError::NotNbd { found: left[..left.len().min(16)].to_vec() });
            }
            // nbd: abort.no-reply
            ClientHandshakeState::Waiting(OptionInProgress { code: OptionCode::Abort, .. })
            | ClientHandshakeState::Over => return Ok(()),
            ClientHandshakeState::Idle => {
                "the server closed the connection during the handshake".to_owned()
            }
            ClientHandshakeState::AwaitTls => {
                "the server closed the connection before TLS was up".to_owned()
            }
            ClientHandshakeState::ExportName(name) => format!(
                "the server closed the connection instead of opening export \"{}\"; it may not \
                 have that export, or need TLS for it",
                printable(name.as_bytes(), 256)
            ),
            ClientHandshakeState::Waiting(waiting) => {
                format!("the server closed the connection instead of answering {}", waiting.code)
            }
        };
        Err(ProtocolError::Unexpected { what })
    }

    /// After [`ClientHandshakeEvent::StartTls`]: TLS is established, and later bytes arrive through it. Resets
    /// what was negotiated before.
    ///
    /// # Errors
    /// [`ProtocolError::Caller`] if that was not the last event.
    pub fn tls_started(&mut self) -> Result<(), ProtocolError> {
        let ClientHandshakeState::AwaitTls = self.state else {
            return Err(ProtocolError::Caller { what: "STARTTLS was not accepted" });
        };
        self.tls = true;
        self.state = ClientHandshakeState::Idle;
        Ok(())
    }

    // nbd: baseline.modes
    fn greeting(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, ClientHandshakeEvent), ProtocolError> {
        // A wrong byte is reported as soon as it arrives: other servers may never send 16 bytes.
        let is_start = |second: u64| {
            let magic = [magic::INIT_PASSWD.to_be_bytes(), second.to_be_bytes()].concat();
            magic.iter().zip(input).all(|(due, found)| due == found)
        };
        let newstyle = is_start(magic::IHAVEOPT);
        let oldstyle = is_start(magic::CLISERV);
        if !newstyle && !oldstyle {
            return Err(ProtocolError::NotNbd { found: input[..input.len().min(16)].to_vec() });
        }
        let mut reader = ByteReader::new(input);
        if reader.take(16).is_none() {
            return Ok((0, ClientHandshakeEvent::NeedMore { bytes: 18 }));
        }
        if oldstyle {
            let bytes = 16 + 8 + 4 + magic::RESERVED_ZEROES;
            let (Some(size), Some(flags)) = (reader.u64(), reader.u32()) else {
                return Ok((0, ClientHandshakeEvent::NeedMore { bytes }));
            };
            if input.len() < bytes {
                return Ok((0, ClientHandshakeEvent::NeedMore { bytes }));
            }
            self.protocol = Some(GreetingForm::Oldstyle);
            // In newstyle, the upper half has the handshake flags.
            let flags = ExportFlags::from_bits((flags & 0xffff) as u16);
            let info = ExportInfo::plain(size, self.flags(flags));
            return Ok((bytes, self.transmission(String::new(), info)));
        }
        let Some(flags) = reader.u16() else {
            return Ok((0, ClientHandshakeEvent::NeedMore { bytes: 18 }));
        };
        // nbd: handshake.unknown-server-flags
        let flags = HandshakeFlags::from_bits(flags);
        let fixed = flags.contains(HandshakeFlags::FIXED_NEWSTYLE);
        self.no_zeroes = flags.contains(HandshakeFlags::NO_ZEROES);
        // nbd: handshake.client-no-zeroes, handshake.no-other-client-flags
        let answer = ClientFlags::NONE
            .with(ClientFlags::FIXED_NEWSTYLE, fixed)
            .with(ClientFlags::NO_ZEROES, self.no_zeroes);
        out.extend_from_slice(&answer.bits().to_be_bytes());
        let protocol = if fixed { GreetingForm::FixedNewstyle } else { GreetingForm::Newstyle };
        self.protocol = Some(protocol);
        self.state = ClientHandshakeState::Idle;
        Ok((18, ClientHandshakeEvent::Greeted(protocol)))
    }

    fn export_name_reply(
        &mut self,
        input: &[u8],
    ) -> Result<(usize, ClientHandshakeEvent), ProtocolError> {
        let bytes = 8 + 2 + if self.no_zeroes { 0 } else { magic::RESERVED_ZEROES };
        let mut reader = ByteReader::new(input);
        match (reader.u64(), reader.u16()) {
            (Some(size), Some(flags)) if input.len() >= bytes => {
                let ClientHandshakeState::ExportName(export) = std::mem::take(&mut self.state)
                else {
                    return Err(ProtocolError::Caller { what: "EXPORT_NAME was not sent" });
                };
                let flags = self.flags(ExportFlags::from_bits(flags));
                Ok((bytes, self.transmission(export, ExportInfo::plain(size, flags))))
            }
            _ => Ok((0, ClientHandshakeEvent::NeedMore { bytes })),
        }
    }

    /// Processes one reply; returns the event if it was the last one of its option.
    fn reply(
        &mut self,
        head: OptionReplyHeader,
        payload: &[u8],
    ) -> Result<Option<ClientHandshakeEvent>, ProtocolError> {
        let ClientHandshakeState::Waiting(waiting) = &mut self.state else {
            return Err(ProtocolError::Caller { what: "no option is under way" });
        };
        if head.option != waiting.code {
            let what = format!("the server answered {}, {} was sent", head.option, waiting.code);
            return Err(ProtocolError::Unexpected { what });
        }
        match head.code {
            ReplyCode::Ack => {}
            // nbd: meta.error-discards
            ReplyCode::Error(reason) => {
                let option = head.option;
                self.state = ClientHandshakeState::Idle;
                return Ok(Some(ClientHandshakeEvent::Refused {
                    option,
                    reason,
                    text: error_text(payload),
                }));
            }
            _ => {
                waiting.take(head, payload)?;
                return Ok(None);
            }
        }
        if !payload.is_empty() {
            return Err(ProtocolError::Malformed {
                what: "acknowledgement",
                why: "it has a payload",
            });
        }
        match std::mem::replace(&mut self.state, ClientHandshakeState::Idle) {
            ClientHandshakeState::Waiting(waiting) => self.acknowledged(waiting).map(Some),
            _ => Err(ProtocolError::Caller { what: "no option is under way" }),
        }
    }

    fn acknowledged(
        &mut self,
        waiting: OptionInProgress,
    ) -> Result<ClientHandshakeEvent, ProtocolError> {
        Ok(match waiting.code {
            OptionCode::Abort => {
                self.state = ClientHandshakeState::Over;
                ClientHandshakeEvent::Aborted
            }
            OptionCode::List => ClientHandshakeEvent::Listed(waiting.entries),
            OptionCode::StartTls => {
                // nbd: structured.after-tls, extended.after-tls
                self.replies = ReplyForm::Simple;
                self.selected = None;
                self.state = ClientHandshakeState::AwaitTls;
                ClientHandshakeEvent::StartTls
            }
            OptionCode::StructuredReply => {
                self.replies = ReplyForm::Structured;
                ClientHandshakeEvent::Accepted(waiting.code)
            }
            OptionCode::ExtendedHeaders => {
                self.replies = ReplyForm::Extended;
                ClientHandshakeEvent::Accepted(waiting.code)
            }
            OptionCode::ListMetaContext => ClientHandshakeEvent::Contexts(waiting.contexts),
            OptionCode::SetMetaContext => {
                self.selected = Some((waiting.export, waiting.contexts.clone()));
                ClientHandshakeEvent::Contexts(waiting.contexts)
            }
            OptionCode::Info | OptionCode::Go => {
                let Some((size, flags)) = waiting.exports else {
                    let why = "size and flags are missing";
                    return Err(ProtocolError::Malformed {
                        what: "information about an export",
                        why,
                    });
                };
                let info = ExportInfo {
                    size,
                    flags: self.flags(flags),
                    block_sizes: waiting.block_sizes.filter(BlockSizeInfo::is_valid),
                    name: waiting.name,
                    description: waiting.description,
                };
                match waiting.code {
                    OptionCode::Go => self.transmission(waiting.export, info),
                    _ => ClientHandshakeEvent::Info(Box::new(info)),
                }
            }
            // Not sent by this client, or not answered by an acknowledgement.
            OptionCode::ExportName | OptionCode::Other(_) => {
                return Err(ProtocolError::Caller { what: "no such option was sent" });
            }
        })
    }

    fn transmission(&mut self, export: String, info: ExportInfo) -> ClientHandshakeEvent {
        // nbd: go.no-more-options
        self.state = ClientHandshakeState::Over;
        let contexts = match self.selected.take() {
            Some((selected, contexts)) if selected == export => contexts,
            _ => Vec::new(),
        };
        ClientHandshakeEvent::Transmission(Box::new(ClientHandshakeResult {
            // The greeting has set it before this state.
            protocol: self.protocol.unwrap_or(GreetingForm::Oldstyle),
            tls: self.tls,
            export,
            headers: self.headers(),
            replies: self.replies,
            contexts,
            info,
        }))
    }

    // nbd: flags.unknown
    /// The export's flags, without those that are invalid in this session.
    fn flags(&self, flags: ExportFlags) -> ExportFlags {
        let mut flags = flags;
        if !flags.contains(ExportFlags::HAS_FLAGS) {
            return ExportFlags::NONE;
        }
        if self.replies == ReplyForm::Simple {
            flags = flags.without(ExportFlags::SEND_DF);
        }
        if self.replies != ReplyForm::Extended {
            // nbd: extended.extensions
            flags = flags.without(ExportFlags::BLOCK_STATUS_PAYLOAD);
        }
        if !flags.contains(ExportFlags::SEND_WRITE_ZEROES) {
            flags = flags.without(ExportFlags::SEND_FAST_ZERO);
        }
        flags
    }
}

impl ExportInfo {
    /// The information of EXPORT_NAME and oldstyle.
    fn plain(size: u64, flags: ExportFlags) -> ExportInfo {
        ExportInfo { size, flags, block_sizes: None, name: None, description: None }
    }
}
