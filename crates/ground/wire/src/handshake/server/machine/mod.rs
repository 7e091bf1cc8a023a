//! The state machine of the server's side: its state, and how it processes received bytes.
//! [`options`] handles a client's options, [`answers`] the caller's answers.

mod answers;
mod options;

use super::{HandshakeConfig, ServerHandshakeEvent, ServerHandshakeResult};
use crate::bytes::ByteReader;
use crate::option::{InfoRequest, MetaContext, OptionCode, OptionError, OptionHeader, emit_error};
use crate::text::cut;
use crate::{ClientFlags, HandshakeFlags, ProtocolError, ReplyForm, limits, magic};

/// The server's side of one newstyle handshake.
#[derive(Debug)]
pub struct ServerHandshake {
    config: HandshakeConfig,
    client: ClientFlags,
    tls: bool,
    /// The client has requested something without TLS, although it is required.
    turned_away: bool,
    stopping: bool,
    /// Malformed or unexpected options, until the caller takes them.
    odd: Vec<(OptionCode, &'static str)>,
    options: u32,
    allowed: u32,
    replies: ReplyForm,
    /// The contexts that the last SET_META_CONTEXT selected, and for which export.
    selected: Option<(String, Vec<MetaContext>)>,
    state: ServerHandshakeState,
}

#[derive(Debug)]
enum ServerHandshakeState {
    ClientFlags,
    Options,
    /// Skips the rest of a payload, then replies.
    Skip {
        left: u32,
        code: OptionCode,
    },
    AskExport {
        code: OptionCode,
        request: InfoRequest,
    },
    AskList,
    AskContexts {
        code: OptionCode,
        export: String,
        empty: bool,
    },
    AwaitTls,
    Ready(Box<ServerHandshakeResult>),
    Over,
}

/// What was made of the bytes of an option.
enum OptionProgress {
    /// There are too few: this many are needed.
    NeedMore(usize),
    /// So many were used; the caller handles the event.
    Bytes(usize, Option<ServerHandshakeEvent>),
}

impl ServerHandshake {
    /// The longest message of a client in bytes.
    pub const MAX_MESSAGE: usize = OptionHeader::LEN + limits::OPTION_PAYLOAD;

    // nbd: baseline.modes
    /// Starts a handshake: appends the greeting to `out`.
    pub fn new(config: HandshakeConfig, out: &mut Vec<u8>) -> ServerHandshake {
        // nbd: handshake.fixed-flag, handshake.no-other-server-flags
        let flags = HandshakeFlags::NONE
            .with(HandshakeFlags::FIXED_NEWSTYLE, config.fixed_newstyle)
            .with(HandshakeFlags::NO_ZEROES, config.no_zeroes);
        out.extend_from_slice(&magic::INIT_PASSWD.to_be_bytes());
        out.extend_from_slice(&magic::IHAVEOPT.to_be_bytes());
        out.extend_from_slice(&flags.bits().to_be_bytes());
        ServerHandshake {
            config,
            client: ClientFlags::NONE,
            tls: false,
            turned_away: false,
            stopping: false,
            odd: Vec::new(),
            options: 0,
            allowed: config.options,
            replies: ReplyForm::Simple,
            selected: None,
            state: ServerHandshakeState::ClientFlags,
        }
    }

    /// Processes received bytes, from the first one that was not consumed before, and appends the
    /// bytes to send to `out`. Returns the number of bytes consumed, and the event.
    ///
    /// After an event that requires an answer, give the answer before the next call.
    ///
    /// # Errors
    /// The connection must be closed, after sending `out` or without.
    pub fn receive(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, ServerHandshakeEvent), ProtocolError> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            let need = |bytes: usize| Ok((used, ServerHandshakeEvent::NeedMore { bytes }));
            match &mut self.state {
                ServerHandshakeState::ClientFlags => match ByteReader::new(rest).u32() {
                    None => return need(4),
                    Some(flags) => {
                        self.take_client_flags(ClientFlags::from_bits(flags))?;
                        used += 4;
                    }
                },
                ServerHandshakeState::Options => match self.take_option(rest, out)? {
                    OptionProgress::NeedMore(bytes) => return need(bytes),
                    OptionProgress::Bytes(bytes, event) => {
                        used += bytes;
                        if let Some(event) = event {
                            return Ok((used, event));
                        }
                    }
                },
                ServerHandshakeState::Skip { left, code } => {
                    let skipped = rest.len().min(*left as usize);
                    #[expect(clippy::cast_possible_truncation, reason = "at most `left`")]
                    let fewer = skipped as u32;
                    *left -= fewer;
                    used += skipped;
                    let code = *code;
                    if *left != 0 {
                        return Ok((used, ServerHandshakeEvent::NeedMore { bytes: 1 }));
                    }
                    if let Some(event) = self.end_skip(code, out) {
                        return Ok((used, event));
                    }
                }
                ServerHandshakeState::Ready(_) => {
                    let ready = std::mem::replace(&mut self.state, ServerHandshakeState::Over);
                    if let ServerHandshakeState::Ready(negotiated) = ready {
                        return Ok((used, ServerHandshakeEvent::Transmission(negotiated)));
                    }
                }
                ServerHandshakeState::AskExport { .. }
                | ServerHandshakeState::AskList
                | ServerHandshakeState::AskContexts { .. } => {
                    return Err(ProtocolError::Caller {
                        what: "the last event has not been answered",
                    });
                }
                ServerHandshakeState::AwaitTls => {
                    return Err(ProtocolError::Caller { what: "TLS has not been started" });
                }
                ServerHandshakeState::Over => {
                    return Err(ProtocolError::Caller { what: "the handshake is over" });
                }
            }
        }
    }

    /// Handles the option at the start of `rest`, or begins to skip it.
    fn take_option(
        &mut self,
        rest: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<OptionProgress, ProtocolError> {
        let Some(head) = OptionHeader::parse(rest)? else {
            return Ok(OptionProgress::NeedMore(OptionHeader::LEN));
        };
        let length = head.length as usize;
        if length > limits::OPTION_PAYLOAD || head.code == OptionCode::Abort {
            self.start_skip(head)?;
            return Ok(OptionProgress::Bytes(OptionHeader::LEN, None));
        }
        let end = OptionHeader::LEN + length;
        let Some(payload) = rest.get(OptionHeader::LEN..end) else {
            return Ok(OptionProgress::NeedMore(end));
        };
        self.begin_option(head.code)?;
        let event = self.option(head.code, payload, out)?;
        if matches!(event, Some(ServerHandshakeEvent::StartTls)) && end < rest.len() {
            return Err(ProtocolError::Unexpected {
                what: "the client sent bytes behind STARTTLS, before TLS could be up".to_owned(),
            });
        }
        Ok(OptionProgress::Bytes(end, event))
    }

    /// After [`ServerHandshakeEvent::StartTls`]: TLS is established, and later bytes arrive through it.
    ///
    /// # Errors
    /// [`ProtocolError::Caller`] if that was not the last event.
    pub fn tls_started(&mut self) -> Result<(), ProtocolError> {
        let ServerHandshakeState::AwaitTls = self.state else {
            return Err(ProtocolError::Caller { what: "STARTTLS was not asked for" });
        };
        self.tls = true;
        self.state = ServerHandshakeState::Options;
        Ok(())
    }

    /// Whether the client has requested something without the required TLS, and has not started it
    /// since.
    pub fn lacks_tls(&self) -> bool {
        self.turned_away && !self.tls
    }

    /// Options refused since the last call because no client should send them like that, and why.
    /// Merely unknown ones are not included.
    pub fn take_odd(&mut self) -> Vec<(OptionCode, &'static str)> {
        std::mem::take(&mut self.odd)
    }

    fn note_odd(&mut self, code: OptionCode, error: OptionError, text: &'static str) {
        if matches!(error, OptionError::Invalid | OptionError::TooBig) {
            self.odd.push((code, text));
        }
    }

    /// The server is stopping: refuses all options from now on.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    // nbd: handshake.unknown-client-flags, handshake.client-flags-match
    fn take_client_flags(&mut self, flags: ClientFlags) -> Result<(), ProtocolError> {
        let offered = ClientFlags::NONE
            .with(ClientFlags::FIXED_NEWSTYLE, self.config.fixed_newstyle)
            .with(ClientFlags::NO_ZEROES, self.config.no_zeroes);
        if !flags.without(offered).is_empty() {
            return Err(ProtocolError::Unexpected {
                what: format!("the client set flags {flags:?}, where only {offered:?} are offered"),
            });
        }
        self.client = flags;
        self.state = ServerHandshakeState::Options;
        Ok(())
    }

    // nbd: handshake.export-name-refused, abort.hard-if-needed, tls.reqd-export-name
    // nbd: export-name.terminate
    /// Refuses an option, if it can be refused.
    fn refuse(
        &mut self,
        code: OptionCode,
        error: OptionError,
        text: &str,
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        if code == OptionCode::ExportName {
            self.state = ServerHandshakeState::Over;
            return Err(ProtocolError::CannotRefuse { why: text.to_owned() });
        }
        emit_error(code, error, &sendable(text), out);
        Ok(())
    }
}

/// Text for users, made a valid string of the protocol.
fn sendable(text: &str) -> String {
    let text = text.replace('\0', " ");
    String::from_utf8_lossy(cut(text.as_bytes())).into_owned()
}
