//! The state machine of the client's side.

use super::{Event, ExportInfo, Negotiated};
use crate::bytes::Reader;
use crate::error::error_text;
use crate::handshake::Protocol;
use crate::option::{
    BlockSizes, Context, Info, InfoRequest, Infos, ListEntry, MetaRequest, OptionCode,
    OptionReplyHeader, ReplyCode, check_string, emit_option,
};
use crate::{
    ClientFlags, Error, ExportFlags, HandshakeFlags, Headers, Replies, limits, magic, printable,
};

/// The client's side of one handshake.
#[derive(Debug, Default)]
pub struct Handshake {
    protocol: Option<Protocol>,
    no_zeroes: bool,
    tls: bool,
    replies: Replies,
    /// The contexts that the last SET_META_CONTEXT selected, and for which export.
    selected: Option<(String, Vec<Context>)>,
    state: State,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Greeting,
    Idle,
    /// An option was sent, its last reply has not come.
    Waiting(Waiting),
    /// EXPORT_NAME was sent with this name.
    ExportName(String),
    AwaitTls,
    Over,
}

/// An option under way, and what its replies have told.
#[derive(Debug)]
struct Waiting {
    code: OptionCode,
    export: String,
    entries: Vec<ListEntry>,
    entries_bytes: usize,
    contexts: Vec<Context>,
    infos: usize,
    exports: Option<(u64, ExportFlags)>,
    block_sizes: Option<BlockSizes>,
    name: Option<String>,
    description: Option<String>,
}

impl Handshake {
    /// The longest message of a server in bytes.
    pub const MAX_MESSAGE: usize = OptionReplyHeader::LEN + limits::OPTION_REPLY;

    /// Starts a handshake; the server speaks first.
    pub fn new() -> Handshake {
        Handshake::default()
    }

    /// How the server greeted, once it has.
    pub fn protocol(&self) -> Option<Protocol> {
        self.protocol
    }

    /// The form of replies that was negotiated so far.
    pub fn replies(&self) -> Replies {
        self.replies
    }

    /// The form of requests that was negotiated so far.
    pub fn headers(&self) -> Headers {
        match self.replies {
            Replies::Extended => Headers::Extended,
            Replies::Simple | Replies::Structured => Headers::Compact,
        }
    }

    /// Takes what has come, from the first byte that was not consumed before, and appends to `out`
    /// what is to be sent. Returns the number of bytes that were consumed, and what happened. Bytes
    /// behind the message that made an event are not consumed.
    ///
    /// # Errors
    /// The connection must be closed.
    pub fn receive(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(usize, Event), Error> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            match &self.state {
                State::Greeting => return self.greeting(rest, out),
                State::Idle => return Ok((used, Event::NeedMore { bytes: 1 })),
                State::ExportName(_) => return self.export_name_reply(rest),
                State::Waiting(_) => {
                    let Some(head) = OptionReplyHeader::parse(rest)? else {
                        let bytes = OptionReplyHeader::LEN;
                        return Ok((used, Event::NeedMore { bytes }));
                    };
                    let length = head.length as usize;
                    if length > limits::OPTION_REPLY {
                        let (len, max) = (head.length.into(), limits::OPTION_REPLY as u64);
                        return Err(Error::TooLong { what: "the server's reply", len, max });
                    }
                    let bytes = OptionReplyHeader::LEN + length;
                    let Some(payload) = rest.get(OptionReplyHeader::LEN..bytes) else {
                        return Ok((used, Event::NeedMore { bytes }));
                    };
                    used += bytes;
                    let event = self.reply(head, payload)?;
                    if event == Some(Event::StartTls) && used < input.len() {
                        return Err(Error::Unexpected {
                            what: "the server sent bytes behind its answer to STARTTLS, before \
                                   TLS could be up"
                                .to_owned(),
                        });
                    }
                    if let Some(event) = event {
                        return Ok((used, event));
                    }
                }
                State::AwaitTls => {
                    return Err(Error::Caller { what: "TLS has not been started" });
                }
                State::Over => return Err(Error::Caller { what: "the handshake is over" }),
            }
        }
    }

    /// What it means that the server has closed the connection now; `left` are bytes that came and
    /// were not consumed.
    ///
    /// # Errors
    /// Always one, but after [`Handshake::abort`], where a server may close without an answer.
    pub fn closed(&self, left: &[u8]) -> Result<(), Error> {
        let what = match &self.state {
            State::Greeting => {
                return Err(Error::NotNbd { found: left[..left.len().min(16)].to_vec() });
            }
            State::Waiting(Waiting { code: OptionCode::Abort, .. }) | State::Over => return Ok(()),
            State::Idle => "the server closed the connection during the handshake".to_owned(),
            State::AwaitTls => "the server closed the connection before TLS was up".to_owned(),
            State::ExportName(name) => format!(
                "the server closed the connection instead of opening export \"{}\"; it may not \
                 have that export, or need TLS for it",
                printable(name.as_bytes(), 256)
            ),
            State::Waiting(waiting) => {
                format!("the server closed the connection instead of answering {}", waiting.code)
            }
        };
        Err(Error::Unexpected { what })
    }

    /// Asks for the exports: [`Event::Listed`].
    ///
    /// # Errors
    /// [`Error::Caller`], for this and all other options: an option is under way, or the server is
    /// not fixed newstyle, or the handshake is over.
    pub fn list(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        self.send(OptionCode::List, "", &[], out)
    }

    /// Asks about an export: [`Event::Info`].
    ///
    /// # Errors
    /// As [`Handshake::list`]; a name that is no string of the protocol.
    pub fn info(&mut self, export: &str, wants: Infos, out: &mut Vec<u8>) -> Result<(), Error> {
        self.send_info(OptionCode::Info, export, wants, out)
    }

    /// Chooses an export: [`Event::Transmission`]. Who wants the block sizes must obey them.
    ///
    /// # Errors
    /// As [`Handshake::info`].
    pub fn go(&mut self, export: &str, wants: Infos, out: &mut Vec<u8>) -> Result<(), Error> {
        self.send_info(OptionCode::Go, export, wants, out)
    }

    /// Chooses an export the old way, without a refusal other than closing the connection:
    /// [`Event::Transmission`].
    ///
    /// # Errors
    /// As [`Handshake::info`], but plain newstyle is fine; extended headers were negotiated.
    pub fn export_name(&mut self, export: &str, out: &mut Vec<u8>) -> Result<(), Error> {
        check_string("export name", export)?;
        if !matches!(self.state, State::Idle) {
            return Err(Error::Caller { what: "no option can be sent now" });
        }
        if self.replies == Replies::Extended {
            return Err(Error::Caller { what: "EXPORT_NAME cannot be sent with extended headers" });
        }
        emit_option(OptionCode::ExportName, export.as_bytes(), out);
        self.state = State::ExportName(export.to_owned());
        Ok(())
    }

    /// Asks for structured replies: [`Event::Accepted`].
    ///
    /// # Errors
    /// As [`Handshake::list`]; they or extended headers are in use.
    pub fn structured_replies(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        if self.replies != Replies::Simple {
            return Err(Error::Caller { what: "structured replies are in use" });
        }
        self.send(OptionCode::StructuredReply, "", &[], out)
    }

    /// Asks for extended headers, which bring structured replies with them: [`Event::Accepted`].
    ///
    /// # Errors
    /// As [`Handshake::list`]; they are in use.
    pub fn extended_headers(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        if self.replies == Replies::Extended {
            return Err(Error::Caller { what: "extended headers are in use" });
        }
        self.send(OptionCode::ExtendedHeaders, "", &[], out)
    }

    /// Asks which contexts an export has, all or those that match: [`Event::Contexts`], whose
    /// numbers do not matter. Servers want structured replies first.
    ///
    /// # Errors
    /// As [`Handshake::info`]; a query that is no string of the protocol; too many queries.
    pub fn list_meta_contexts(
        &mut self,
        export: &str,
        queries: &[String],
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        self.send_contexts(OptionCode::ListMetaContext, export, queries, out)
    }

    /// Selects contexts of an export, instead of those selected before: [`Event::Contexts`]. They
    /// hold when the same export is chosen afterwards.
    ///
    /// # Errors
    /// As [`Handshake::list_meta_contexts`]; structured replies are not in use.
    pub fn set_meta_contexts(
        &mut self,
        export: &str,
        queries: &[String],
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if self.replies == Replies::Simple {
            return Err(Error::Caller { what: "contexts need structured replies" });
        }
        self.send_contexts(OptionCode::SetMetaContext, export, queries, out)?;
        self.selected = None;
        Ok(())
    }

    /// Asks for TLS: [`Event::StartTls`].
    ///
    /// # Errors
    /// As [`Handshake::list`]; TLS is in use.
    pub fn starttls(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        if self.tls {
            return Err(Error::Caller { what: "TLS is in use" });
        }
        self.send(OptionCode::StartTls, "", &[], out)
    }

    /// After [`Event::StartTls`]: TLS is up, and what comes from now on came through it. What was
    /// negotiated before is forgotten.
    ///
    /// # Errors
    /// [`Error::Caller`] when that was not the last event.
    pub fn tls_started(&mut self) -> Result<(), Error> {
        let State::AwaitTls = self.state else {
            return Err(Error::Caller { what: "STARTTLS was not accepted" });
        };
        self.tls = true;
        self.state = State::Idle;
        Ok(())
    }

    /// Ends the session: [`Event::Aborted`], or the server closes without an answer.
    ///
    /// # Errors
    /// As [`Handshake::list`].
    pub fn abort(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        self.send(OptionCode::Abort, "", &[], out)
    }

    fn send_info(
        &mut self,
        code: OptionCode,
        export: &str,
        wants: Infos,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        check_string("export name", export)?;
        let mut payload = Vec::new();
        InfoRequest { name: export.to_owned(), wants }.emit(&mut payload);
        self.send(code, export, &payload, out)
    }

    fn send_contexts(
        &mut self,
        code: OptionCode,
        export: &str,
        queries: &[String],
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        check_string("export name", export)?;
        for query in queries {
            check_string("context query", query)?;
        }
        if queries.len() > limits::QUERIES {
            let (len, max) = (queries.len() as u64, limits::QUERIES as u64);
            return Err(Error::TooLong { what: "list of context queries", len, max });
        }
        let mut payload = Vec::new();
        let queries = queries.to_vec();
        MetaRequest { export: export.to_owned(), queries }.emit(&mut payload);
        self.send(code, export, &payload, out)
    }

    fn send(
        &mut self,
        code: OptionCode,
        export: &str,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if !matches!(self.state, State::Idle) {
            return Err(Error::Caller { what: "no option can be sent now" });
        }
        if self.protocol != Some(Protocol::FixedNewstyle) {
            return Err(Error::Caller { what: "the server is too old for this option" });
        }
        emit_option(code, payload, out);
        self.state = State::Waiting(Waiting::new(code, export));
        Ok(())
    }

    fn greeting(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(usize, Event), Error> {
        // A wrong byte is told as soon as it comes: who is no NBD server may never send 16 of them.
        let is_start = |second: u64| {
            let magic = [magic::INIT_PASSWD.to_be_bytes(), second.to_be_bytes()].concat();
            magic.iter().zip(input).all(|(due, found)| due == found)
        };
        let (newstyle, oldstyle) = (is_start(magic::IHAVEOPT), is_start(magic::CLISERV));
        if !newstyle && !oldstyle {
            return Err(Error::NotNbd { found: input[..input.len().min(16)].to_vec() });
        }
        let mut reader = Reader::new(input);
        if reader.take(16).is_none() {
            return Ok((0, Event::NeedMore { bytes: 18 }));
        }
        if oldstyle {
            let bytes = 16 + 8 + 4 + magic::RESERVED_ZEROES;
            let (Some(size), Some(flags)) = (reader.u64(), reader.u32()) else {
                return Ok((0, Event::NeedMore { bytes }));
            };
            if input.len() < bytes {
                return Ok((0, Event::NeedMore { bytes }));
            }
            self.protocol = Some(Protocol::Oldstyle);
            // The upper half is where newstyle has its handshake flags.
            let flags = ExportFlags::from_bits(flags as u16);
            let info = ExportInfo::plain(size, self.flags(flags));
            return Ok((bytes, self.transmission(String::new(), info)));
        }
        let Some(flags) = reader.u16() else {
            return Ok((0, Event::NeedMore { bytes: 18 }));
        };
        let flags = HandshakeFlags::from_bits(flags);
        let fixed = flags.contains(HandshakeFlags::FIXED_NEWSTYLE);
        self.no_zeroes = flags.contains(HandshakeFlags::NO_ZEROES);
        let answer = ClientFlags::NONE
            .with(ClientFlags::FIXED_NEWSTYLE, fixed)
            .with(ClientFlags::NO_ZEROES, self.no_zeroes);
        out.extend_from_slice(&answer.bits().to_be_bytes());
        let protocol = if fixed { Protocol::FixedNewstyle } else { Protocol::Newstyle };
        self.protocol = Some(protocol);
        self.state = State::Idle;
        Ok((18, Event::Greeted(protocol)))
    }

    fn export_name_reply(&mut self, input: &[u8]) -> Result<(usize, Event), Error> {
        let bytes = 8 + 2 + if self.no_zeroes { 0 } else { magic::RESERVED_ZEROES };
        let mut reader = Reader::new(input);
        match (reader.u64(), reader.u16()) {
            (Some(size), Some(flags)) if input.len() >= bytes => {
                let State::ExportName(export) = std::mem::take(&mut self.state) else {
                    return Err(Error::Caller { what: "EXPORT_NAME was not sent" });
                };
                let flags = self.flags(ExportFlags::from_bits(flags));
                Ok((bytes, self.transmission(export, ExportInfo::plain(size, flags))))
            }
            _ => Ok((0, Event::NeedMore { bytes })),
        }
    }

    /// Handles one reply; the event, if it was the last one of its option.
    fn reply(&mut self, head: OptionReplyHeader, payload: &[u8]) -> Result<Option<Event>, Error> {
        let State::Waiting(waiting) = &mut self.state else {
            return Err(Error::Caller { what: "no option is under way" });
        };
        if head.option != waiting.code {
            let what = format!("the server answered {}, {} was sent", head.option, waiting.code);
            return Err(Error::Unexpected { what });
        }
        match head.code {
            ReplyCode::Ack => {}
            ReplyCode::Error(reason) => {
                let option = head.option;
                self.state = State::Idle;
                return Ok(Some(Event::Refused { option, reason, text: error_text(payload) }));
            }
            _ => {
                waiting.take(head, payload)?;
                return Ok(None);
            }
        }
        if !payload.is_empty() {
            return Err(Error::Malformed { what: "acknowledgement", why: "it has a payload" });
        }
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Waiting(waiting) => self.acknowledged(waiting).map(Some),
            _ => Err(Error::Caller { what: "no option is under way" }),
        }
    }

    fn acknowledged(&mut self, waiting: Waiting) -> Result<Event, Error> {
        Ok(match waiting.code {
            OptionCode::Abort => {
                self.state = State::Over;
                Event::Aborted
            }
            OptionCode::List => Event::Listed(waiting.entries),
            OptionCode::StartTls => {
                self.replies = Replies::Simple;
                self.selected = None;
                self.state = State::AwaitTls;
                Event::StartTls
            }
            OptionCode::StructuredReply => {
                self.replies = Replies::Structured;
                Event::Accepted(waiting.code)
            }
            OptionCode::ExtendedHeaders => {
                self.replies = Replies::Extended;
                Event::Accepted(waiting.code)
            }
            OptionCode::ListMetaContext => Event::Contexts(waiting.contexts),
            OptionCode::SetMetaContext => {
                self.selected = Some((waiting.export, waiting.contexts.clone()));
                Event::Contexts(waiting.contexts)
            }
            OptionCode::Info | OptionCode::Go => {
                let Some((size, flags)) = waiting.exports else {
                    let why = "size and flags are missing";
                    return Err(Error::Malformed { what: "information about an export", why });
                };
                let info = ExportInfo {
                    size,
                    flags: self.flags(flags),
                    block_sizes: waiting.block_sizes.filter(BlockSizes::is_valid),
                    name: waiting.name,
                    description: waiting.description,
                };
                match waiting.code {
                    OptionCode::Go => self.transmission(waiting.export, info),
                    _ => Event::Info(Box::new(info)),
                }
            }
            // Not sent by this client, or not answered by an acknowledgement.
            OptionCode::ExportName | OptionCode::Other(_) => {
                return Err(Error::Caller { what: "no such option was sent" });
            }
        })
    }

    fn transmission(&mut self, export: String, info: ExportInfo) -> Event {
        self.state = State::Over;
        let contexts = match self.selected.take() {
            Some((selected, contexts)) if selected == export => contexts,
            _ => Vec::new(),
        };
        Event::Transmission(Box::new(Negotiated {
            // It has been set by the greeting, without which no state leads here.
            protocol: self.protocol.unwrap_or(Protocol::Oldstyle),
            tls: self.tls,
            export,
            headers: self.headers(),
            replies: self.replies,
            contexts,
            info,
        }))
    }

    /// The export's flags, less those that make no sense in this session.
    fn flags(&self, flags: ExportFlags) -> ExportFlags {
        let mut flags = flags;
        if !flags.contains(ExportFlags::HAS_FLAGS) {
            return ExportFlags::NONE;
        }
        if self.replies == Replies::Simple {
            flags = flags.without(ExportFlags::SEND_DF);
        }
        if self.replies != Replies::Extended {
            flags = flags.without(ExportFlags::BLOCK_STATUS_PAYLOAD);
        }
        if !flags.contains(ExportFlags::SEND_WRITE_ZEROES) {
            flags = flags.without(ExportFlags::SEND_FAST_ZERO);
        }
        flags
    }
}

impl ExportInfo {
    /// What EXPORT_NAME and oldstyle tell.
    fn plain(size: u64, flags: ExportFlags) -> ExportInfo {
        ExportInfo { size, flags, block_sizes: None, name: None, description: None }
    }
}

impl Waiting {
    fn new(code: OptionCode, export: &str) -> Waiting {
        Waiting {
            code,
            export: export.to_owned(),
            entries: Vec::new(),
            entries_bytes: 0,
            contexts: Vec::new(),
            infos: 0,
            exports: None,
            block_sizes: None,
            name: None,
            description: None,
        }
    }

    /// Takes a reply that is not the last.
    fn take(&mut self, head: OptionReplyHeader, payload: &[u8]) -> Result<(), Error> {
        match (self.code, head.code) {
            (OptionCode::List, ReplyCode::Server) => {
                self.entries_bytes += payload.len();
                below("the server's list of exports", self.entries.len(), limits::EXPORTS)?;
                below("the server's list of exports", self.entries_bytes, limits::LIST_BYTES)?;
                self.entries.push(ListEntry::parse(payload)?);
            }
            (OptionCode::Info | OptionCode::Go, ReplyCode::Info) => {
                self.infos += 1;
                below("the server's list of information", self.infos, limits::INFOS)?;
                match Info::parse(payload)? {
                    Info::Export { size, flags } => self.exports = Some((size, flags)),
                    Info::Name(name) => self.name = Some(name),
                    Info::Description(text) => self.description = Some(text),
                    Info::BlockSize(sizes) => self.block_sizes = Some(sizes),
                    Info::Other(_) => {}
                }
            }
            (OptionCode::ListMetaContext, ReplyCode::MetaContext) => {
                let (held, max) = (self.contexts.len(), limits::CONTEXTS_LISTED);
                below("the server's list of contexts", held, max)?;
                self.contexts.push(Context::parse(payload)?);
            }
            (OptionCode::SetMetaContext, ReplyCode::MetaContext) => {
                let (held, max) = (self.contexts.len(), limits::CONTEXTS);
                below("the server's list of contexts", held, max)?;
                let context = Context::parse(payload)?;
                if self.contexts.iter().any(|before| before.id == context.id) {
                    let why = "two contexts have the same number";
                    return Err(Error::Malformed { what: "list of contexts", why });
                }
                self.contexts.push(context);
            }
            (option, reply) => {
                let what = format!("the server answered {option} with {reply:?}");
                return Err(Error::Unexpected { what });
            }
        }
        Ok(())
    }
}

/// Checks that a list that holds `held` may grow by one.
fn below(what: &'static str, held: usize, max: usize) -> Result<(), Error> {
    if held < max {
        return Ok(());
    }
    Err(Error::TooLong { what, len: held as u64 + 1, max: max as u64 })
}
