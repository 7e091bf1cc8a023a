//! Drives a connection's handshake: `wire` makes the messages, this module looks up exports and
//! starts TLS.

use std::io::ErrorKind;

use blockhaul_block::{BlockSizes, Can, Facts};
use blockhaul_catalog::Export;
use blockhaul_io::{RecvWindow, SendQueue, Stream};
use blockhaul_tls::TlsErrorKind;
use blockhaul_wire::handshake::server::{
    ExportReply, OptionRefusal, ServerHandshake, ServerHandshakeEvent, ServerHandshakeResult,
};
use blockhaul_wire::option::check_query;
use blockhaul_wire::{BlockSizeInfo, ExportFlags, MetaContext, ReplyForm, RequestForm, http};

use crate::connection::Connection;
use crate::disconnect::DisconnectReason;
use crate::export_lookup::ExportLookup;
use crate::log_fields::record;
use crate::{Limits, Offers, Server, TlsPolicy};

/// Maximum bytes of replies collected before they are sent.
const OUT_MAX: usize = 64 << 10;

/// The client's choice, and what it sent after the handshake.
pub(crate) struct ChosenExport {
    pub(crate) negotiated: ServerHandshakeResult,
    pub(crate) export: Export,
    pub(crate) inbox: RecvWindow,
    pub(crate) outbox: SendQueue,
}

/// The sending side of a handshake: through TLS once established.
struct HandshakeSender<'a> {
    stream: &'a Stream,
    queue: SendQueue,
}

impl HandshakeSender<'_> {
    async fn say(&mut self, out: &mut Vec<u8>) -> Result<(), String> {
        self.speak(out).await.map_err(|error| error.to_string())
    }

    /// The same; false: the client has disconnected, which is not an error here, as it may also do
    /// so after the reply.
    async fn is_heard(&mut self, out: &mut Vec<u8>) -> Result<bool, String> {
        match self.speak(out).await {
            Ok(()) => Ok(true),
            Err(error) => match error.kind() {
                ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Ok(false),
                _ => Err(error.to_string()),
            },
        }
    }

    /// Sends the last reply to a rejected client; failing to send it does not matter.
    async fn ends(
        &mut self,
        out: &mut Vec<u8>,
        error: &blockhaul_wire::ProtocolError,
    ) -> DisconnectReason {
        let _ = self.say(out).await;
        self.queue.close(self.stream);
        error.to_string().into()
    }

    async fn speak(&mut self, out: &mut Vec<u8>) -> std::io::Result<()> {
        self.queue.head(out);
        out.clear();
        self.queue.send_all(self.stream).await
    }
}

/// A connection in its handshake.
pub(crate) struct ConnectionHandshake<'a, 'server> {
    pub(crate) server: &'a Server,
    // nbd: tls.mode-stays
    /// The TLS settings at the start of the handshake.
    pub(crate) tls: TlsPolicy,
    pub(crate) connection: &'a Connection,
    pub(crate) lookup: &'a mut ExportLookup<'server>,
    pub(crate) stream: &'a Stream,
}

/// How a handshake continues after an event.
enum HandshakeStep {
    /// More events may be ready.
    Step,
    /// The client has ended the handshake.
    Left,
    /// The client has chosen an export.
    Served(Box<ServerHandshakeResult>, Export),
}

impl ConnectionHandshake<'_, '_> {
    /// Runs the handshake; `None` if the client ended it.
    pub(crate) async fn run(mut self) -> Result<Option<ChosenExport>, DisconnectReason> {
        if self.server.config.offers.oldstyle {
            return self.oldstyle().await.map(Some);
        }
        let mut out = Vec::new();
        // Small until a client needs more: many silent clients must be cheap.
        let mut inbox = RecvWindow::new();
        let mut mouth = HandshakeSender { stream: self.stream, queue: SendQueue::default() };
        let mut https = false;
        if self.server.config.offers.http {
            https = self.https(&mut inbox, &mut mouth).await?;
            if !http_request(&mut inbox, &mut mouth).await? {
                return Ok(None);
            }
            out.extend_from_slice(http::SWITCHING);
            // It is around everything that follows.
            self.tls = TlsPolicy::Off;
        }
        let handshake = ServerHandshake::new(
            offered(&self.server.config.offers, &self.lookup.limits, &self.tls),
            &mut out,
        );
        let mut talk = HandshakeMessages { handshake, inbox, mouth, out };
        loop {
            let event = self.receive(&mut talk).await?;
            match self.answer(&mut talk, event).await? {
                HandshakeStep::Step => {}
                HandshakeStep::Left => return left(&talk.handshake),
                HandshakeStep::Served(negotiated, export) => {
                    let HandshakeMessages { inbox, mouth, .. } = talk;
                    let mut negotiated = *negotiated;
                    negotiated.tls |= https;
                    return Ok(Some(ChosenExport {
                        negotiated,
                        export,
                        inbox,
                        outbox: mouth.queue,
                    }));
                }
            }
        }
    }

    /// Establishes TLS at once, if it is required; whether it is.
    async fn https(
        &mut self,
        inbox: &mut RecvWindow,
        mouth: &mut HandshakeSender<'_>,
    ) -> Result<bool, DisconnectReason> {
        let TlsPolicy::Require(acceptor) = &self.tls else { return Ok(false) };
        let session = secure(acceptor, self.connection, self.lookup, self.stream).await?;
        inbox.secure(session.opener, &session.received);
        mouth.queue.secure(session.sealer);
        Ok(true)
    }

    /// Processes the received bytes.
    async fn receive(
        &self,
        talk: &mut HandshakeMessages<'_>,
    ) -> Result<ServerHandshakeEvent, DisconnectReason> {
        let (used, event) = match talk.handshake.receive(talk.inbox.bytes(), &mut talk.out) {
            Ok(step) => step,
            // nbd: abort.no-hard-disconnect
            Err(error) => return Err(talk.mouth.ends(&mut talk.out, &error).await),
        };
        talk.inbox.consume(used);
        for (option, why) in talk.handshake.take_odd() {
            let odd = self.server.odd.lock().expect("no panic under this lock");
            odd.odd(self.connection, &option.to_string(), why);
        }
        // Replies to options that arrived together: a list may be long, and requested often.
        if talk.out.len() > OUT_MAX {
            talk.mouth.say(&mut talk.out).await?;
        }
        Ok(event)
    }

    async fn answer(
        &mut self,
        talk: &mut HandshakeMessages<'_>,
        event: ServerHandshakeEvent,
    ) -> Result<HandshakeStep, DisconnectReason> {
        match event {
            ServerHandshakeEvent::NeedMore { bytes } => return talk.need_more(bytes).await,
            ServerHandshakeEvent::Export { name, go, .. } => {
                let found = if go {
                    self.lookup.choose(&name).await
                } else {
                    self.lookup.find(&name).await
                };
                let (offers, limits) = (&self.server.config.offers, &self.lookup.limits);
                let answer = found.map(|export| describe(offers, limits, &export, &name));
                // EXPORT_NAME has no error reply, but send the replies to earlier options.
                if let Err(error) = talk.handshake.answer_export(answer, &mut talk.out) {
                    return Err(talk.mouth.ends(&mut talk.out, &error).await);
                }
            }
            ServerHandshakeEvent::List => {
                let exports = self.lookup.list().await;
                let exports = exports.as_deref().map_err(Clone::clone);
                let answered = talk.handshake.answer_list(exports, &mut talk.out);
                answered.map_err(|error| error.to_string())?;
            }
            ServerHandshakeEvent::MetaContext { export, queries, set } => {
                let found = if set {
                    self.lookup.find_for_contexts(&export).await
                } else {
                    self.lookup.find(&export).await
                };
                let answer = found.map(|found| contexts(&found.device.facts(), &queries, set));
                let answered = talk.handshake.answer_contexts(answer, &mut talk.out);
                answered.map_err(|error| error.to_string())?;
            }
            ServerHandshakeEvent::StartTls => self.start_tls(talk).await?,
            ServerHandshakeEvent::Abort => {
                // The client may have closed already.
                let _ = talk.mouth.say(&mut talk.out).await;
                talk.mouth.queue.close(self.stream);
                return Ok(HandshakeStep::Left);
            }
            ServerHandshakeEvent::Transmission(negotiated) => {
                let Ok(export) = self.lookup.find(&negotiated.export).await else {
                    return Err("the export was removed".to_string().into());
                };
                self.settle(&export)?;
                if !talk.mouth.is_heard(&mut talk.out).await? {
                    return Ok(HandshakeStep::Left);
                }
                return Ok(HandshakeStep::Served(negotiated, export));
            }
        }
        Ok(HandshakeStep::Step)
    }

    /// Establishes TLS; the handshake continues through it.
    async fn start_tls(
        &mut self,
        talk: &mut HandshakeMessages<'_>,
    ) -> Result<(), DisconnectReason> {
        talk.mouth.say(&mut talk.out).await?;
        let (TlsPolicy::On(acceptor) | TlsPolicy::Require(acceptor)) = &self.tls else {
            return Err("TLS was started although it was not offered".to_string().into());
        };
        // The handshake rejects bytes sent after the option but before TLS. Later bytes belong to
        // the client's TLS handshake.
        let session = secure(acceptor, self.connection, self.lookup, self.stream).await?;
        // nbd: tls.all-after
        talk.inbox.secure(session.opener, &session.received);
        talk.mouth.queue.secure(session.sealer);
        talk.handshake.tls_started().map_err(|error| error.to_string().into())
    }

    /// Reserves the connection's place before the client gets the reply that it is served.
    fn settle(&self, export: &Export) -> Result<(), DisconnectReason> {
        if !self.server.clients.settle(self.connection.id) {
            return Err(DisconnectReason::Crowded);
        }
        self.connection.chose(&export.name);
        Ok(())
    }

    /// The old handshake: the server describes the default export, and requests follow.
    async fn oldstyle(&mut self) -> Result<ChosenExport, DisconnectReason> {
        let config = &self.server.config;
        if matches!(config.tls, TlsPolicy::Require(_)) {
            let why = "TLS is required, which oldstyle clients do not support";
            return Err(DisconnectReason::Refused(why.into()));
        }
        let refused =
            |refusal: OptionRefusal| format!("no export for an oldstyle client: {}", refusal.text);
        let export = self.lookup.find("").await.map_err(refused)?;
        let info = describe(&config.offers, &self.lookup.limits, &export, "");
        self.settle(&export)?;
        let mut out = Vec::new();
        blockhaul_wire::handshake::server::oldstyle(info.size, info.flags, &mut out);
        let mut mouth = HandshakeSender { stream: self.stream, queue: SendQueue::default() };
        mouth.say(&mut out).await?;
        let negotiated = ServerHandshakeResult {
            export: export.name.clone(),
            headers: RequestForm::Compact,
            replies: ReplyForm::Simple,
            contexts: Vec::new(),
            flags: info.flags,
            obeys_block_sizes: false,
            tls: false,
        };
        let inbox = RecvWindow::new();
        let outbox = mouth.queue;
        Ok(ChosenExport { negotiated, export, inbox, outbox })
    }
}

/// Reads the request to go on with NBD; false: the client has disconnected before the end of it.
async fn http_request(
    inbox: &mut RecvWindow,
    mouth: &mut HandshakeSender<'_>,
) -> Result<bool, DisconnectReason> {
    loop {
        let refused = match http::request(inbox.bytes()) {
            Ok(Some((true, used))) => {
                inbox.consume(used);
                return Ok(true);
            }
            Ok(Some((false, _))) => {
                (http::UPGRADE_REQUIRED, "it does not ask for an upgrade to nbd".to_string())
            }
            Err(error) => (http::BAD_REQUEST, error.to_string()),
            Ok(None) => {
                if inbox.bytes().len() * 2 > inbox.capacity() {
                    inbox.grow(2 * http::HEAD_MAX);
                }
                match inbox.fill(mouth.stream).await {
                    Ok(true) => continue,
                    Ok(false) => return Ok(false),
                    Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(false),
                    Err(error) => return Err(error.to_string().into()),
                }
            }
        };
        let (answer, why) = refused;
        let _ = mouth.say(&mut answer.to_vec()).await;
        mouth.queue.close(mouth.stream);
        return Err(DisconnectReason::Refused(format!("HTTP request: {why}")));
    }
}

/// The messages between the two sides.
struct HandshakeMessages<'a> {
    handshake: ServerHandshake,
    inbox: RecvWindow,
    mouth: HandshakeSender<'a>,
    /// Replies to send.
    out: Vec<u8>,
}

impl HandshakeMessages<'_> {
    /// Sends the replies and waits for more bytes; the client is about to send at least `bytes`.
    async fn need_more(&mut self, bytes: usize) -> Result<HandshakeStep, DisconnectReason> {
        if !self.mouth.is_heard(&mut self.out).await? {
            return Ok(HandshakeStep::Left);
        }
        if bytes > self.inbox.capacity() {
            self.inbox.grow(bytes);
        }
        match self.inbox.fill(self.mouth.stream).await {
            Ok(true) => Ok(HandshakeStep::Step),
            Ok(false) => Ok(HandshakeStep::Left),
            // It has disconnected without reading all replies.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(HandshakeStep::Left),
            Err(error) => Err(error.to_string().into()),
        }
    }
}

// nbd: tls.mode
/// What the handshake offers.
fn offered(
    offers: &Offers,
    limits: &Limits,
    tls: &TlsPolicy,
) -> blockhaul_wire::handshake::server::HandshakeConfig {
    blockhaul_wire::handshake::server::HandshakeConfig {
        fixed_newstyle: offers.fixed_newstyle,
        no_zeroes: offers.no_zeroes,
        structured: offers.structured,
        extended: offers.extended,
        meta_contexts: offers.contexts,
        tls: match tls {
            TlsPolicy::Off => blockhaul_wire::handshake::server::TlsRequirement::Off,
            TlsPolicy::On(_) => blockhaul_wire::handshake::server::TlsRequirement::Offered,
            TlsPolicy::Require(_) => blockhaul_wire::handshake::server::TlsRequirement::Required,
        },
        options: limits.options,
        queries: limits.queries,
        name: limits.name,
    }
}

/// Establishes TLS, and records and logs the client's identity.
async fn secure(
    acceptor: &blockhaul_tls::TlsAcceptor,
    connection: &Connection,
    lookup: &mut ExportLookup<'_>,
    stream: &Stream,
) -> Result<blockhaul_tls::TlsSession, DisconnectReason> {
    let accepted = acceptor.accept(stream).await;
    // nbd: tls.failed-server
    let session = accepted.map_err(|error| match error.kind() {
        // Clients leave so that need no further connection. Those that do not accept the certificate
        // send an alert, or reset the connection.
        TlsErrorKind::Closed => DisconnectReason::Left(error.to_string()),
        _ => DisconnectReason::Refused(error.to_string()),
    })?;
    let about = &session.about;
    let who = about.peer.as_deref().unwrap_or("an unnamed client");
    lookup.secured(about);
    connection.secured(about);
    let peer = &connection.peer;
    let version = &about.version;
    let suite = &about.suite;
    record!(Debug, connection, tls = version, suite; "{peer} with {who}: {version} {suite}");
    Ok(session)
}

/// The client has ended the handshake without an export. That is allowed, but an attempt without
/// TLS is reported to the operator.
fn left(handshake: &ServerHandshake) -> Result<Option<ChosenExport>, DisconnectReason> {
    if handshake.lacks_tls() {
        let why = "TLS is required, but the client did not start it";
        return Err(DisconnectReason::Refused(why.into()));
    }
    Ok(None)
}

fn describe(offers: &Offers, limits: &Limits, export: &Export, asked: &str) -> ExportReply {
    let facts = export.device.facts();
    let description = export.description.as_ref().unwrap_or(&facts.description);
    let of_device = sizes_of_device(offers, &facts);
    let sizes = of_device.unwrap_or(facts.block);
    let usual = sizes.minimum == 1
        && sizes.preferred == BlockSizeInfo::DEFAULT.preferred
        && sizes.maximum >= BlockSizeInfo::DEFAULT.maximum;
    let silent = !offers.block_sizes && of_device.is_none() && usual;
    let least = sizes.minimum.max(512);
    let maximum = largest_payload(offers, limits, &facts);
    ExportReply {
        size: facts.size,
        flags: flags(&facts),
        block_sizes: (!silent).then(|| BlockSizeInfo {
            minimum: sizes.minimum,
            preferred: sizes.preferred.max(least).min(1 << maximum.ilog2()),
            maximum,
        }),
        require_block_sizes: false,
        name: (export.name != asked).then(|| export.name.clone()),
        description: Some(description).filter(|text| !text.is_empty()).cloned(),
    }
}

/// The sizes to advertise, before the limits of the server.
fn sizes_of_device(offers: &Offers, facts: &Facts) -> Option<BlockSizes> {
    let free = |preferred| BlockSizes { minimum: 1, preferred, maximum: u32::MAX };
    // The device accepts any request.
    let told = facts.advertised.map(|sizes| sizes.dividing(facts.size));
    match (told, offers.preferred) {
        (Some(told), Some(least)) => {
            Some(BlockSizes { preferred: told.preferred.max(least), ..told })
        }
        (told, least) => told.or_else(|| least.map(free)),
    }
}

/// The advertised maximum payload in bytes. The advertised sizes must be valid for any limits: a
/// power of two in the middle, and in order.
pub(crate) fn largest_payload(offers: &Offers, limits: &Limits, facts: &Facts) -> u32 {
    let of_device = sizes_of_device(offers, facts);
    let sizes = of_device.unwrap_or(facts.block);
    let most = match of_device {
        // As the device reports it, whatever the server's limit.
        Some(sizes) if !offers.block_sizes => sizes.maximum,
        _ => sizes.maximum.min(limits.payload),
    };
    most.max(sizes.minimum.max(512))
}

// nbd: flags.only-supported
fn flags(facts: &Facts) -> ExportFlags {
    let can = facts.can - facts.withheld;
    ExportFlags::SEND_DF
        // nbd: flags.read-only
        .with(ExportFlags::READ_ONLY, !can.contains(Can::WRITE))
        .with(ExportFlags::SEND_FLUSH, can.contains(Can::FLUSH))
        .with(ExportFlags::SEND_FUA, can.contains(Can::FUA))
        .with(ExportFlags::ROTATIONAL, facts.rotational)
        .with(ExportFlags::SEND_TRIM, can.contains(Can::TRIM))
        .with(ExportFlags::SEND_WRITE_ZEROES, can.contains(Can::ZERO))
        // nbd: flags.fast-zero
        .with(ExportFlags::SEND_FAST_ZERO, can.contains(Can::FAST_ZERO))
        // nbd: flags.multi-conn
        .with(ExportFlags::CAN_MULTI_CONN, can.contains(Can::MULTI_CONN))
        .with(ExportFlags::SEND_CACHE, can.contains(Can::CACHE))
}

/// Contexts that the queries select. When listing, no query means all, and a query that ends in a
/// colon means everything after it ("Metadata querying"). A context's ID is its index.
fn contexts(facts: &Facts, queries: &[String], set: bool) -> Vec<MetaContext> {
    let all = facts.contexts.iter().take(blockhaul_wire::limits::CONTEXTS).zip(0_u32..);
    // nbd: base.set-ignores-wildcard, base.list-wildcard, base.unknown-leaf
    // nbd: meta.unknown-namespace, meta.list-matching
    let wanted = |name: &str| {
        if set {
            queries.iter().any(|query| query == name)
        } else {
            // nbd: meta.list-all
            queries.is_empty()
                || queries.iter().any(|query| {
                    query == name || (query.ends_with(':') && name.starts_with(query.as_str()))
                })
        }
    };
    // A device may be a foreign server, with names against the rules.
    all.filter(|(name, _)| check_query(name).is_ok() && wanted(name))
        .map(|(name, id)| MetaContext { id: if set { id } else { 0 }, name: name.clone() })
        .collect()
}
