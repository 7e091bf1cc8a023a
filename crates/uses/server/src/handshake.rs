//! Drives a connection's handshake: `wire` decides what is said, this looks up exports and starts TLS.

use std::io::ErrorKind;
use std::sync::{Arc, Mutex};

use blockhaul_block::{Can, Device, Facts};
use blockhaul_io::{RecvWindow, SendQueue, Stream};
use blockhaul_wire::handshake::server::{Event, ExportInfo, Handshake, Negotiated, Refusal};
use blockhaul_wire::{BlockSizes, Context, ExportFlags, Headers, Replies};

use crate::complaints::Complaints;
use crate::connection::Connection;
use crate::hall::{Hall, entry};
use crate::records::record;
use crate::{Config, Ending, Export, Tls};

/// Bytes of answers that are collected before they are sent.
const OUT_MAX: usize = 64 << 10;

/// What a client has chosen, and what it sent behind the handshake.
pub(crate) struct Chosen {
    pub(crate) negotiated: Negotiated,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) inbox: RecvWindow,
    pub(crate) outbox: SendQueue,
}

/// What a handshake has to say, on its way out: through TLS once that is up.
struct Mouth<'a> {
    stream: &'a Stream,
    queue: SendQueue,
}

impl Mouth<'_> {
    async fn say(&mut self, out: &mut Vec<u8>) -> Result<(), String> {
        self.speak(out).await.map_err(|error| error.to_string())
    }

    /// The same; false: the client has left, which is no more to speak of than when it leaves after it
    /// has heard everything.
    async fn is_heard(&mut self, out: &mut Vec<u8>) -> Result<bool, String> {
        match self.speak(out).await {
            Ok(()) => Ok(true),
            Err(error) => match error.kind() {
                ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Ok(false),
                _ => Err(error.to_string()),
            },
        }
    }

    /// The last words to a client that is sent away: whether they are heard does not matter any more.
    async fn ends(&mut self, out: &mut Vec<u8>, error: &blockhaul_wire::Error) -> Ending {
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

/// Runs the handshake; `None` when the client left politely. `settle` makes the connection's place its own,
/// before the client hears that it is served.
pub(crate) async fn run(
    config: &Config,
    tls: &Tls,
    connection: &Connection,
    hall: &mut Hall<'_>,
    stream: &Stream,
    settle: &dyn Fn() -> Result<(), Ending>,
    odd: &Mutex<Complaints>,
) -> Result<Option<Chosen>, Ending> {
    let offers = &config.offers;
    let mut mouth = Mouth { stream, queue: SendQueue::default() };
    let mut out = Vec::new();
    if offers.oldstyle {
        return oldstyle(config, connection, hall, mouth, settle).await.map(Some);
    }
    let mut handshake = Handshake::new(offered(config, tls), &mut out);
    // Small until a client needs more: a crowd of silent clients must stay cheap.
    let mut inbox = RecvWindow::new();
    loop {
        let (used, event) = match handshake.receive(inbox.bytes(), &mut out) {
            Ok(step) => step,
            Err(error) => return Err(mouth.ends(&mut out, &error).await),
        };
        inbox.consume(used);
        for (option, why) in handshake.take_odd() {
            let odd = odd.lock().expect("no panic under this lock");
            odd.odd(connection, &option.to_string(), why);
        }
        // Answers to options that came in one go: a list may be long, and asked for often.
        if out.len() > OUT_MAX {
            mouth.say(&mut out).await?;
        }
        match event {
            Event::NeedMore { bytes } => {
                if !mouth.is_heard(&mut out).await? {
                    return left(&handshake);
                }
                if bytes > inbox.capacity() {
                    inbox.grow(bytes);
                }
                match inbox.fill(stream).await {
                    Ok(true) => {}
                    Ok(false) => return left(&handshake),
                    // It has left without reading all that was said.
                    Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                        return left(&handshake);
                    }
                    Err(error) => return Err(error.to_string().into()),
                }
            }
            Event::Export { name, go, .. } => {
                let found = match go {
                    true => hall.choose(&name).await,
                    false => hall.find(&name).await,
                };
                let answer = found.map(|export| describe(config, &export, &name));
                // EXPORT_NAME cannot be refused, but options before it have their answers.
                if let Err(error) = handshake.answer_export(answer, &mut out) {
                    return Err(mouth.ends(&mut out, &error).await);
                }
            }
            Event::List => {
                let exports = hall.list().await;
                let exports = exports.as_deref().map_err(Clone::clone);
                handshake.answer_list(exports, &mut out).map_err(|error| error.to_string())?;
            }
            Event::MetaContext { export, queries, set } => {
                let found = match set {
                    true => hall.find_for_contexts(&export).await,
                    false => hall.find(&export).await,
                };
                let answer = found.map(|found| contexts(&found.device.facts(), &queries, set));
                handshake.answer_contexts(answer, &mut out).map_err(|error| error.to_string())?;
            }
            Event::StartTls => {
                mouth.say(&mut out).await?;
                let (Tls::On(acceptor) | Tls::Require(acceptor)) = tls else {
                    return Err("TLS was started although it was not offered".to_string().into());
                };
                // What came behind the option, before TLS could be up, is refused by the handshake; what
                // comes from here on is the client's part of TLS, or not understood.
                let session = secure(acceptor, connection, hall, stream).await?;
                inbox.secure(session.opener, &session.received);
                mouth.queue.secure(session.sealer);
                handshake.tls_started().map_err(|error| error.to_string())?;
            }
            Event::Abort => {
                // The client may have closed already.
                let _ = mouth.say(&mut out).await;
                mouth.queue.close(stream);
                return left(&handshake);
            }
            Event::Transmission(negotiated) => {
                let Ok(Export { device, name, .. }) = hall.find(&negotiated.export).await else {
                    return Err("the export has gone".to_string().into());
                };
                settle()?;
                connection.chose(&name);
                mouth.say(&mut out).await?;
                let outbox = mouth.queue;
                return Ok(Some(Chosen { negotiated: *negotiated, device, inbox, outbox }));
            }
        }
    }
}

/// What the handshake offers.
fn offered(config: &Config, tls: &Tls) -> blockhaul_wire::handshake::server::Config {
    let (offers, limits) = (&config.offers, &config.limits);
    blockhaul_wire::handshake::server::Config {
        fixed_newstyle: offers.fixed_newstyle,
        no_zeroes: offers.no_zeroes,
        structured: offers.structured,
        extended: offers.extended,
        meta_contexts: offers.contexts,
        tls: match tls {
            Tls::Off => blockhaul_wire::handshake::server::Tls::Off,
            Tls::On(_) => blockhaul_wire::handshake::server::Tls::Offered,
            Tls::Require(_) => blockhaul_wire::handshake::server::Tls::Required,
        },
        options: limits.options,
        queries: limits.queries,
        name: limits.name,
    }
}

/// Brings up TLS, and notes and logs who the client has proved to be.
async fn secure(
    acceptor: &blockhaul_tls::Acceptor,
    connection: &Connection,
    hall: &mut Hall<'_>,
    stream: &Stream,
) -> Result<blockhaul_tls::Session, Ending> {
    let accepted = acceptor.accept(stream).await;
    let session = accepted.map_err(|error| Ending::refused(error.to_string()))?;
    let about = &session.about;
    let who = about.peer.as_deref().unwrap_or("nobody in particular");
    hall.secured(about);
    connection.secured(about);
    let (peer, version, suite) = (&connection.peer, &about.version, &about.suite);
    record!(Debug, connection, tls = version, suite; "{peer} with {who}: {version} {suite}");
    Ok(session)
}

/// The client has left without an export, as it may; but whoever runs the server wants to know who
/// tried without TLS.
fn left(handshake: &Handshake) -> Result<Option<Chosen>, Ending> {
    match handshake.lacks_tls() {
        true => Err(Ending::refused("TLS is required, and the client has not started it".into())),
        false => Ok(None),
    }
}

/// The old handshake: the default export is told, and requests follow.
async fn oldstyle(
    config: &Config,
    connection: &Connection,
    hall: &mut Hall<'_>,
    mut mouth: Mouth<'_>,
    settle: &dyn Fn() -> Result<(), Ending>,
) -> Result<Chosen, Ending> {
    if matches!(config.tls, Tls::Require(_)) {
        return Err(Ending::refused("TLS is required, which oldstyle clients cannot have".into()));
    }
    let refused = |refusal: Refusal| format!("no export for an oldstyle client: {}", refusal.text);
    let export = hall.find("").await.map_err(refused)?;
    let info = describe(config, &export, "");
    let mut out = Vec::new();
    settle()?;
    connection.chose(&export.name);
    blockhaul_wire::handshake::server::oldstyle(info.size, info.flags, &mut out);
    mouth.say(&mut out).await?;
    let negotiated = Negotiated {
        export: export.name,
        headers: Headers::Compact,
        replies: Replies::Simple,
        contexts: Vec::new(),
        flags: info.flags,
        obeys_block_sizes: false,
        tls: false,
    };
    let (inbox, outbox) = (RecvWindow::new(), mouth.queue);
    Ok(Chosen { negotiated, device: export.device, inbox, outbox })
}

fn describe(config: &Config, export: &Export, asked: &str) -> ExportInfo {
    let facts = export.device.facts();
    // Whatever the limits are, what is told must be valid: a power of two in the middle, and in order.
    let free = |preferred| blockhaul_block::BlockSizes { minimum: 1, preferred, maximum: u32::MAX };
    let of_device = match (facts.advertised, config.offers.preferred) {
        (Some(told), Some(least)) => {
            Some(blockhaul_block::BlockSizes { preferred: told.preferred.max(least), ..told })
        }
        (told, least) => told.or_else(|| least.map(free)),
    };
    let told = of_device.unwrap_or(facts.block);
    let usual = told.minimum == 1
        && told.preferred == BlockSizes::DEFAULT.preferred
        && told.maximum >= BlockSizes::DEFAULT.maximum;
    let silent = !config.offers.block_sizes && of_device.is_none() && usual;
    let least = told.minimum.max(512);
    let most = match of_device {
        // As the device says it, whatever is served at once.
        Some(told) if !config.offers.block_sizes => told.maximum,
        _ => told.maximum.min(config.limits.payload),
    };
    let maximum = most.max(least);
    ExportInfo {
        size: facts.size,
        flags: flags(&facts),
        block_sizes: (!silent).then(|| BlockSizes {
            minimum: told.minimum,
            preferred: told.preferred.max(least).min(1 << maximum.ilog2()),
            maximum,
        }),
        require_block_sizes: false,
        name: (export.name != asked).then(|| export.name.clone()),
        description: Some(entry(export).description).filter(|text| !text.is_empty()),
    }
}

fn flags(facts: &Facts) -> ExportFlags {
    let can = facts.can - facts.withheld;
    ExportFlags::SEND_DF
        .with(ExportFlags::READ_ONLY, !can.contains(Can::WRITE))
        .with(ExportFlags::SEND_FLUSH, can.contains(Can::FLUSH))
        .with(ExportFlags::SEND_FUA, can.contains(Can::FUA))
        .with(ExportFlags::ROTATIONAL, facts.rotational)
        .with(ExportFlags::SEND_TRIM, can.contains(Can::TRIM))
        .with(ExportFlags::SEND_WRITE_ZEROES, can.contains(Can::ZERO))
        .with(ExportFlags::SEND_FAST_ZERO, can.contains(Can::FAST_ZERO))
        .with(ExportFlags::CAN_MULTI_CONN, can.contains(Can::MULTI_CONN))
        .with(ExportFlags::SEND_CACHE, can.contains(Can::CACHE))
}

/// Contexts that the queries select. When listing, no query means all, and a query that ends in a
/// colon means everything behind it ("Metadata querying"). A context's id is its index.
fn contexts(facts: &Facts, queries: &[String], set: bool) -> Vec<Context> {
    let all = facts.contexts.iter().take(blockhaul_wire::limits::CONTEXTS).zip(0_u32..);
    let wanted = |name: &str| match set {
        true => queries.iter().any(|query| query == name),
        false => {
            queries.is_empty()
                || queries.iter().any(|query| {
                    query == name || (query.ends_with(':') && name.starts_with(query.as_str()))
                })
        }
    };
    all.filter(|(name, _)| wanted(name))
        .map(|(name, id)| Context { id: if set { id } else { 0 }, name: name.clone() })
        .collect()
}
