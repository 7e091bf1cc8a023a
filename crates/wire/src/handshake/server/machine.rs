//! The state machine of the server's side.

use super::{Config, Event, ExportInfo, Negotiated, Refusal, Tls, plain_flags};
use crate::bytes::Reader;
use crate::option::{
    BlockSizes, Context, Info, InfoRequest, Infos, ListEntry, MetaRequest, OptionCode, OptionError,
    OptionHeader, ReplyCode, check_string, emit_error, emit_reply, string,
};
use crate::reply::cut;
use crate::{ClientFlags, Error, ExportFlags, HandshakeFlags, Headers, Replies, limits, magic};

/// The server's side of one newstyle handshake.
#[derive(Debug)]
pub struct Handshake {
    config: Config,
    client: ClientFlags,
    tls: bool,
    /// The client has asked for something without TLS, where that is required.
    turned_away: bool,
    stopping: bool,
    options: u32,
    allowed: u32,
    replies: Replies,
    /// The contexts that the last SET_META_CONTEXT selected, and for which export.
    selected: Option<(String, Vec<Context>)>,
    state: State,
}

#[derive(Debug)]
enum State {
    ClientFlags,
    Options,
    /// Drops what is left of a payload, then answers.
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
    Ready(Box<Negotiated>),
    Over,
}

impl Handshake {
    /// The longest message of a client in bytes.
    pub const MAX_MESSAGE: usize = OptionHeader::LEN + limits::OPTION_PAYLOAD;

    /// Starts a handshake: appends the greeting to `out`.
    pub fn new(config: Config, out: &mut Vec<u8>) -> Handshake {
        let flags = HandshakeFlags::NONE
            .with(HandshakeFlags::FIXED_NEWSTYLE, config.fixed_newstyle)
            .with(HandshakeFlags::NO_ZEROES, config.no_zeroes);
        out.extend_from_slice(&magic::INIT_PASSWD.to_be_bytes());
        out.extend_from_slice(&magic::IHAVEOPT.to_be_bytes());
        out.extend_from_slice(&flags.bits().to_be_bytes());
        Handshake {
            config,
            client: ClientFlags::NONE,
            tls: false,
            turned_away: false,
            stopping: false,
            options: 0,
            allowed: config.options,
            replies: Replies::Simple,
            selected: None,
            state: State::ClientFlags,
        }
    }

    /// Takes what has come, from the first byte that was not consumed before, and appends to `out`
    /// what is to be sent. Returns the number of bytes that were consumed, and what to do.
    ///
    /// After an event that wants an answer, the answer must be given before the next call.
    ///
    /// # Errors
    /// The connection must be closed, when what is in `out` has been sent or without that.
    pub fn receive(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(usize, Event), Error> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            let need = |bytes: usize| Ok((used, Event::NeedMore { bytes }));
            match &mut self.state {
                State::ClientFlags => match Reader::new(rest).u32() {
                    None => return need(4),
                    Some(flags) => {
                        self.take_client_flags(ClientFlags::from_bits(flags))?;
                        used += 4;
                    }
                },
                State::Options => {
                    let Some(head) = OptionHeader::parse(rest)? else {
                        return need(OptionHeader::LEN);
                    };
                    let length = head.length as usize;
                    if length > limits::OPTION_PAYLOAD || head.code == OptionCode::Abort {
                        self.start_skip(head)?;
                        used += OptionHeader::LEN;
                        continue;
                    }
                    let end = OptionHeader::LEN + length;
                    let Some(payload) = rest.get(OptionHeader::LEN..end) else {
                        return need(end);
                    };
                    used += end;
                    self.begin_option(head.code)?;
                    let event = self.option(head.code, payload, out)?;
                    if matches!(event, Some(Event::StartTls)) && used < input.len() {
                        return Err(Error::Unexpected {
                            what: "the client sent bytes behind STARTTLS, before TLS could be up"
                                .to_owned(),
                        });
                    }
                    if let Some(event) = event {
                        return Ok((used, event));
                    }
                }
                State::Skip { left, code } => {
                    let skipped = rest.len().min(*left as usize);
                    *left -= skipped as u32;
                    used += skipped;
                    let code = *code;
                    if *left != 0 {
                        return Ok((used, Event::NeedMore { bytes: 1 }));
                    }
                    if let Some(event) = self.end_skip(code, out) {
                        return Ok((used, event));
                    }
                }
                State::Ready(_) => {
                    let ready = std::mem::replace(&mut self.state, State::Over);
                    if let State::Ready(negotiated) = ready {
                        return Ok((used, Event::Transmission(negotiated)));
                    }
                }
                State::AskExport { .. } | State::AskList | State::AskContexts { .. } => {
                    return Err(Error::Caller { what: "the last event has not been answered" });
                }
                State::AwaitTls => {
                    return Err(Error::Caller { what: "TLS has not been started" });
                }
                State::Over => return Err(Error::Caller { what: "the handshake is over" }),
            }
        }
    }

    /// Answers [`Event::Export`]. When the client chose the export and may have it, the next
    /// [`Handshake::receive`] returns [`Event::Transmission`].
    ///
    /// # Errors
    /// [`Error::CannotRefuse`] when the client used EXPORT_NAME, which has no answer but closing the
    /// connection. [`Error::Caller`] when nothing was asked, or for names and block sizes that
    /// break the protocol's rules.
    pub fn answer_export(
        &mut self,
        answer: Result<ExportInfo, Refusal>,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let State::AskExport { code, request } = std::mem::replace(&mut self.state, State::Options)
        else {
            return Err(Error::Caller { what: "no question about an export is open" });
        };
        let info = match answer {
            Ok(info) => info,
            Err(refusal) => return self.refuse(code, refusal.error, &refusal.text, out),
        };
        if info.block_sizes.is_some_and(|sizes| !sizes.is_valid()) {
            return Err(Error::Caller {
                what: "the export's block sizes break the protocol's rules",
            });
        }
        let contexts = match &self.selected {
            Some((export, contexts)) if *export == request.name => contexts.clone(),
            _ => Vec::new(),
        };
        let flags = self.flags(&info, code, !contexts.is_empty());
        if code != OptionCode::ExportName {
            self.emit_info(code, &request, &info, flags, out)?;
        }
        if info.require_block_sizes && info.block_sizes.is_some() && !request.wants.block_size {
            let text = "this export has block sizes that must be obeyed, ask for them";
            return self.refuse(code, OptionError::BlockSizeRequired, text, out);
        }
        match code {
            OptionCode::ExportName => {
                out.extend_from_slice(&info.size.to_be_bytes());
                out.extend_from_slice(&flags.bits().to_be_bytes());
                if !self.client.contains(ClientFlags::NO_ZEROES) {
                    out.extend_from_slice(&[0; magic::RESERVED_ZEROES]);
                }
            }
            _ => emit_reply(code, ReplyCode::Ack, &[], out),
        }
        if code != OptionCode::Info {
            self.state = State::Ready(Box::new(Negotiated {
                export: request.name,
                headers: match self.replies {
                    Replies::Extended => Headers::Extended,
                    Replies::Simple | Replies::Structured => Headers::Compact,
                },
                replies: self.replies,
                contexts,
                flags,
                obeys_block_sizes: request.wants.block_size && info.block_sizes.is_some(),
                tls: self.tls,
            }));
        }
        Ok(())
    }

    /// Answers [`Event::List`] with the exports, in the order in which clients shall see them.
    ///
    /// # Errors
    /// [`Error::Caller`] when nothing was asked, or for a name that is no string of the protocol.
    pub fn answer_list(
        &mut self,
        answer: Result<&[ListEntry], Refusal>,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let State::AskList = std::mem::replace(&mut self.state, State::Options) else {
            return Err(Error::Caller { what: "no question for the exports is open" });
        };
        let entries = match answer {
            Ok(entries) => entries,
            Err(refusal) => {
                return self.refuse(OptionCode::List, refusal.error, &refusal.text, out);
            }
        };
        for entry in entries {
            sendable_name(&entry.name)?;
            let description = sendable(&entry.description);
            let mut payload = Vec::new();
            ListEntry { name: entry.name.clone(), description }.emit(&mut payload);
            emit_reply(OptionCode::List, ReplyCode::Server, &payload, out);
        }
        emit_reply(OptionCode::List, ReplyCode::Ack, &[], out);
        // A client may ask about each of them; asking for the list again earns nothing more.
        let listed = entries.len().min(limits::EXPORTS) as u32;
        let allowed = self.config.options.saturating_add(listed * limits::OPTIONS_PER_EXPORT);
        self.allowed = self.allowed.max(allowed);
        Ok(())
    }

    /// Answers [`Event::MetaContext`] with the contexts that match. Their numbers must differ when
    /// they are selected, and do not matter when they are listed.
    ///
    /// # Errors
    /// [`Error::Caller`] when nothing was asked, or for a number twice or a name that is no string
    /// of the protocol.
    pub fn answer_contexts(
        &mut self,
        answer: Result<Vec<Context>, Refusal>,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let State::AskContexts { code, export, empty } =
            std::mem::replace(&mut self.state, State::Options)
        else {
            return Err(Error::Caller { what: "no question about contexts is open" });
        };
        let set = code == OptionCode::SetMetaContext;
        let mut contexts = match answer {
            Ok(contexts) => contexts,
            Err(refusal) => return self.refuse(code, refusal.error, &refusal.text, out),
        };
        if set && empty {
            contexts.clear();
        }
        if set && contexts.len() > limits::CONTEXTS {
            return self.refuse(code, OptionError::TooBig, "too many contexts are selected", out);
        }
        for (i, context) in contexts.iter().enumerate() {
            sendable_name(&context.name)?;
            if set && contexts[..i].iter().any(|before| before.id == context.id) {
                return Err(Error::Caller { what: "two contexts have the same number" });
            }
        }
        for context in &contexts {
            let id = if set { context.id } else { 0 };
            let mut payload = Vec::new();
            Context { id, name: context.name.clone() }.emit(&mut payload);
            emit_reply(code, ReplyCode::MetaContext, &payload, out);
        }
        emit_reply(code, ReplyCode::Ack, &[], out);
        if set {
            self.selected = Some((export, contexts));
        }
        Ok(())
    }

    /// After [`Event::StartTls`]: TLS is up, and what comes from now on came through it.
    ///
    /// # Errors
    /// [`Error::Caller`] when that was not the last event.
    pub fn tls_started(&mut self) -> Result<(), Error> {
        let State::AwaitTls = self.state else {
            return Err(Error::Caller { what: "STARTTLS was not asked for" });
        };
        self.tls = true;
        self.state = State::Options;
        Ok(())
    }

    /// Whether the client has asked for something without TLS although that is required, and has not
    /// started it since.
    pub fn lacks_tls(&self) -> bool {
        self.turned_away && !self.tls
    }

    /// The server is stopping: options are refused from now on, until the client gets the hint.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    fn take_client_flags(&mut self, flags: ClientFlags) -> Result<(), Error> {
        let offered = ClientFlags::NONE
            .with(ClientFlags::FIXED_NEWSTYLE, self.config.fixed_newstyle)
            .with(ClientFlags::NO_ZEROES, self.config.no_zeroes);
        if !flags.without(offered).is_empty() {
            return Err(Error::Unexpected {
                what: format!("the client set flags {flags:?}, where only {offered:?} are offered"),
            });
        }
        self.client = flags;
        self.state = State::Options;
        Ok(())
    }

    /// Begins to drop a payload that is too long to be read, or that does not matter (ABORT).
    fn start_skip(&mut self, head: OptionHeader) -> Result<(), Error> {
        self.begin_option(head.code)?;
        if head.length > limits::OPTION_SKIP {
            let (len, max) = (head.length.into(), limits::OPTION_SKIP.into());
            return Err(Error::TooLong { what: "payload of an option", len, max });
        }
        if head.code == OptionCode::ExportName {
            return Err(Error::CannotRefuse { why: "the export's name is too long".to_owned() });
        }
        self.state = State::Skip { left: head.length, code: head.code };
        Ok(())
    }

    fn end_skip(&mut self, code: OptionCode, out: &mut Vec<u8>) -> Option<Event> {
        self.state = State::Options;
        if code == OptionCode::Abort {
            self.state = State::Over;
            emit_reply(code, ReplyCode::Ack, &[], out);
            return Some(Event::Abort);
        }
        let (error, text) = match (self.forbidden(code), code) {
            (Some(refusal), _) => refusal,
            (None, OptionCode::Other(_)) => (OptionError::Unsupported, "the option is not known"),
            (None, _) => (OptionError::TooBig, "the option is too long"),
        };
        emit_error(code, error, text, out);
        None
    }

    /// Why no option of this kind is taken now, whatever it holds.
    fn forbidden(&self, code: OptionCode) -> Option<(OptionError, &'static str)> {
        if self.stopping {
            return Some((OptionError::Shutdown, "the server is stopping"));
        }
        let plain = self.config.tls == Tls::Required && !self.tls;
        if plain && code != OptionCode::StartTls {
            return Some((OptionError::TlsRequired, "TLS must be started first"));
        }
        None
    }

    /// Counts an option, and checks that the client may send it at all.
    fn begin_option(&mut self, code: OptionCode) -> Result<(), Error> {
        self.options += 1;
        let harmless = matches!(code, OptionCode::StartTls | OptionCode::Abort);
        self.turned_away |= self.config.tls == Tls::Required && !self.tls && !harmless;
        if self.options > self.allowed {
            let (len, max) = (self.options.into(), self.allowed.into());
            return Err(Error::TooLong { what: "the client's list of options", len, max });
        }
        if !self.client.contains(ClientFlags::FIXED_NEWSTYLE) && code != OptionCode::ExportName {
            return Err(Error::Unexpected {
                what: format!("the client sent {code} without fixed newstyle"),
            });
        }
        if code == OptionCode::SetMetaContext {
            // It replaces what was selected before, also when it fails.
            self.selected = None;
        }
        Ok(())
    }

    /// Handles one whole option; the event, if the caller must know of it.
    fn option(
        &mut self,
        code: OptionCode,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Event>, Error> {
        let (error, text) = if let Some(refusal) = self.forbidden(code) {
            refusal
        } else {
            match self.known_option(code, payload, out)? {
                Handled::Event(event) => return Ok(Some(event)),
                Handled::Answered => return Ok(None),
                Handled::Refused(error, text) => (error, text),
            }
        };
        self.refuse(code, error, text, out)?;
        Ok(None)
    }

    fn known_option(
        &mut self,
        code: OptionCode,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Handled, Error> {
        use Handled::Refused;
        let with_data = !payload.is_empty();
        let no_data = "this option has no data";
        Ok(match code {
            OptionCode::ExportName if self.replies == Replies::Extended => {
                Refused(OptionError::Invalid, "extended headers need GO instead of EXPORT_NAME")
            }
            OptionCode::ExportName => match string("export name", payload) {
                Err(_) => Refused(OptionError::Invalid, "the export's name is malformed"),
                Ok(name) => {
                    let name = name.to_owned();
                    self.ask_export(code, InfoRequest { name, wants: Infos::default() })
                }
            },
            OptionCode::Info | OptionCode::Go => match InfoRequest::parse(payload) {
                Err(_) => Refused(OptionError::Invalid, "malformed request for information"),
                Ok(request) => self.ask_export(code, request),
            },
            OptionCode::List | OptionCode::StartTls if with_data => {
                Refused(OptionError::Invalid, no_data)
            }
            OptionCode::List => {
                self.state = State::AskList;
                Handled::Event(Event::List)
            }
            OptionCode::StartTls if self.tls => Refused(OptionError::Invalid, "TLS is in use"),
            OptionCode::StartTls if self.config.tls == Tls::Off => {
                Refused(OptionError::Unsupported, "TLS is not offered")
            }
            OptionCode::StartTls => {
                self.replies = Replies::Simple;
                self.selected = None;
                self.state = State::AwaitTls;
                emit_reply(code, ReplyCode::Ack, &[], out);
                Handled::Event(Event::StartTls)
            }
            OptionCode::StructuredReply if self.config.structured => {
                match (with_data, self.replies) {
                    (true, _) => Refused(OptionError::Invalid, no_data),
                    (_, Replies::Extended) => Refused(
                        OptionError::ExtendedHeadersRequired,
                        "extended headers are in use, they replace structured replies",
                    ),
                    (_, Replies::Structured) => {
                        Refused(OptionError::Invalid, "structured replies are in use")
                    }
                    (_, Replies::Simple) => self.acknowledge(code, Replies::Structured, out),
                }
            }
            OptionCode::ExtendedHeaders if self.config.extended => {
                match (with_data, self.replies) {
                    (true, _) => Refused(OptionError::Invalid, no_data),
                    (_, Replies::Extended) => {
                        Refused(OptionError::Invalid, "extended headers are in use")
                    }
                    _ => self.acknowledge(code, Replies::Extended, out),
                }
            }
            OptionCode::ListMetaContext | OptionCode::SetMetaContext
                if self.config.meta_contexts =>
            {
                if self.replies == Replies::Simple {
                    return Ok(Refused(
                        OptionError::Invalid,
                        "contexts need structured replies or extended headers",
                    ));
                }
                match MetaRequest::parse(payload) {
                    Err(Error::TooLong { what: crate::option::QUERIES, .. }) => {
                        Refused(OptionError::TooBig, "too many queries")
                    }
                    Err(_) => Refused(OptionError::Invalid, "malformed request for contexts"),
                    Ok(MetaRequest { queries, .. }) if queries.len() > self.config.queries => {
                        Refused(OptionError::TooBig, "too many queries")
                    }
                    Ok(MetaRequest { export, .. }) if export.len() > self.config.name => {
                        Refused(OptionError::TooBig, NAME_TOO_LONG)
                    }
                    Ok(MetaRequest { export, queries }) => {
                        let set = code == OptionCode::SetMetaContext;
                        let empty = queries.is_empty();
                        self.state = State::AskContexts { code, export: export.clone(), empty };
                        Handled::Event(Event::MetaContext { export, queries, set })
                    }
                }
            }
            _ => Refused(OptionError::Unsupported, "the option is not known"),
        })
    }

    fn ask_export(&mut self, code: OptionCode, request: InfoRequest) -> Handled {
        if request.name.len() > self.config.name {
            return Handled::Refused(OptionError::TooBig, NAME_TOO_LONG);
        }
        let (name, wants) = (request.name.clone(), request.wants);
        self.state = State::AskExport { code, request };
        Handled::Event(Event::Export { name, wants, go: code != OptionCode::Info })
    }

    fn acknowledge(&mut self, code: OptionCode, replies: Replies, out: &mut Vec<u8>) -> Handled {
        self.replies = replies;
        emit_reply(code, ReplyCode::Ack, &[], out);
        Handled::Answered
    }

    /// Refuses an option, if it can be refused.
    fn refuse(
        &mut self,
        code: OptionCode,
        error: OptionError,
        text: &str,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if code == OptionCode::ExportName {
            self.state = State::Over;
            return Err(Error::CannotRefuse { why: text.to_owned() });
        }
        emit_error(code, error, &sendable(text), out);
        Ok(())
    }

    /// The export's flags, corrected for what was negotiated.
    fn flags(&self, info: &ExportInfo, code: OptionCode, has_contexts: bool) -> ExportFlags {
        let flags = info.flags | ExportFlags::HAS_FLAGS;
        if self.replies == Replies::Simple {
            return plain_flags(flags);
        }
        // As QEMU does it: with contexts in GO, always in INFO, which may come before them.
        let payload = self.replies == Replies::Extended
            && self.config.meta_contexts
            && (has_contexts || code == OptionCode::Info);
        let df = flags.contains(ExportFlags::SEND_DF);
        plain_flags(flags)
            .with(ExportFlags::SEND_DF, df)
            .with(ExportFlags::BLOCK_STATUS_PAYLOAD, payload)
    }

    fn emit_info(
        &self,
        code: OptionCode,
        request: &InfoRequest,
        info: &ExportInfo,
        flags: ExportFlags,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let mut items = vec![Info::Export { size: info.size, flags }];
        if request.wants.name {
            let name = info.name.as_ref().unwrap_or(&request.name);
            sendable_name(name)?;
            items.push(Info::Name(name.clone()));
        }
        if let (true, Some(description)) = (request.wants.description, &info.description) {
            items.push(Info::Description(sendable(description)));
        }
        // Sizes that differ from the defaults should be told also to who does not ask.
        if let Some(sizes) = info.block_sizes
            && (request.wants.block_size || sizes != BlockSizes::DEFAULT)
        {
            items.push(Info::BlockSize(sizes));
        }
        for item in items {
            let mut payload = Vec::new();
            item.emit(&mut payload);
            emit_reply(code, ReplyCode::Info, &payload, out);
        }
        Ok(())
    }
}

const NAME_TOO_LONG: &str = "the export's name is longer than this server takes";

/// What became of an option.
enum Handled {
    Event(Event),
    Answered,
    Refused(OptionError, &'static str),
}

/// Text for people, made a string of the protocol.
fn sendable(text: &str) -> String {
    let text = text.replace('\0', " ");
    String::from_utf8_lossy(cut(text.as_bytes())).into_owned()
}

fn sendable_name(name: &str) -> Result<(), Error> {
    check_string("name", name)
        .map_err(|_| Error::Caller { what: "a name is longer than 4096 bytes or holds a NUL" })
}
