//! The two sides of the handshake against each other, and against peers that break the rules.

// Helpers of tests may panic as tests do.
#![allow(clippy::unwrap_used)]

use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq};
use proptest::proptest;

use wire::handshake::Protocol;
use wire::handshake::client::{self, Handshake as Client};
use wire::handshake::negotiation::{End, Negotiation, Step, Wants};
use wire::handshake::server::{self, Config, ExportInfo, Handshake as Server, Refusal, Tls};
use wire::option::{InfoRequest, MetaRequest, OptionHeader, OptionReplyHeader, ReplyCode};
use wire::{
    BlockSizes, Context, Error, ExportFlags, Headers, Infos, ListEntry, OptionCode, OptionError,
    Replies, limits, magic,
};

const FLAGS: ExportFlags = ExportFlags::from_bits(0xded);

/// A server with the exports "a" (all there is to tell) and "b" (nothing but a size); "" is "a".
fn export(name: &str) -> Result<ExportInfo, Refusal> {
    match name {
        "" | "a" => Ok(ExportInfo {
            size: 1 << 40,
            flags: FLAGS,
            block_sizes: Some(BlockSizes { minimum: 512, ..BlockSizes::DEFAULT }),
            require_block_sizes: false,
            name: Some("a".to_owned()),
            description: Some("the first".to_owned()),
        }),
        "b" => Ok(ExportInfo { size: 5, ..ExportInfo::default() }),
        _ => Err(Refusal::new(OptionError::Unknown, format!("no export {name:?} here\x1b"))),
    }
}

fn contexts(queries: &[String], set: bool) -> Vec<Context> {
    let known = ["base:allocation", "x-test:one"].iter().zip([17, 4]);
    let wanted = |name: &str| queries.iter().any(|query| query == name);
    let list_all = !set && queries.is_empty();
    known
        .filter(|(name, _)| list_all || wanted(name))
        .map(|(name, id)| Context { id, name: (*name).to_owned() })
        .collect()
}

/// Answers an event as that server would.
fn answer(server: &mut Server, event: server::Event, out: &mut Vec<u8>) -> Result<(), Error> {
    match event {
        server::Event::Export { name, .. } => server.answer_export(export(&name), out),
        server::Event::List => {
            let entry = |name: &str, text: &str| ListEntry {
                name: name.to_owned(),
                description: text.to_owned(),
            };
            server.answer_list(Ok(&[entry("a", "the first"), entry("b", "")]), out)
        }
        server::Event::MetaContext { queries, set, .. } => {
            server.answer_contexts(Ok(contexts(&queries, set)), out)
        }
        server::Event::StartTls => server.tls_started(),
        event => panic!("{event:?}"),
    }
}

/// Bytes on their way, cut by a random sequence.
struct Pipe {
    bytes: Vec<u8>,
    arrived: usize,
}

impl Pipe {
    fn new() -> Pipe {
        Pipe { bytes: Vec::new(), arrived: 0 }
    }

    /// What has arrived after some more has.
    fn more(&mut self, cuts: &mut impl Iterator<Item = u8>) -> &[u8] {
        let step = 1 + usize::from(cuts.next().unwrap());
        self.arrived = self.bytes.len().min(self.arrived + step);
        &self.bytes[..self.arrived]
    }

    fn consume(&mut self, used: usize) {
        self.bytes.drain(..used);
        self.arrived -= used;
    }
}

/// Runs a negotiation against a server; both results.
fn negotiate(
    config: Config,
    wants: Wants,
    cuts: &[u8],
) -> (Result<client::Negotiated, Error>, Option<server::Negotiated>) {
    let mut cuts = cuts.iter().copied().cycle();
    let (mut up, mut down) = (Pipe::new(), Pipe::new());
    let mut server = Server::new(config, &mut down.bytes);
    let mut client = Negotiation::new(wants).unwrap();
    let (mut theirs, mut ours) = (None, None);
    for _ in 0..10_000 {
        if ours.is_none() {
            match client.receive(down.more(&mut cuts), &mut up.bytes) {
                Ok((used, step)) => {
                    down.consume(used);
                    match step {
                        Step::NeedMore { .. } => {}
                        Step::Transmission(negotiated) => ours = Some(Ok(*negotiated)),
                        Step::StartTls => client.tls_started().unwrap(),
                        Step::Options => panic!("{step:?}"),
                    }
                }
                Err(error) => ours = Some(Err(error)),
            }
        }
        if theirs.is_none() {
            match server.receive(up.more(&mut cuts), &mut down.bytes) {
                Ok((used, event)) => {
                    up.consume(used);
                    match event {
                        server::Event::NeedMore { .. } => {}
                        server::Event::Transmission(negotiated) => theirs = Some(Some(*negotiated)),
                        server::Event::Abort => theirs = Some(None),
                        event => match answer(&mut server, event, &mut down.bytes) {
                            Ok(()) => {}
                            Err(_) => theirs = Some(None),
                        },
                    }
                }
                Err(_) => theirs = Some(None),
            }
        }
        match (ours.take(), theirs.take()) {
            (Some(ours), Some(theirs)) => {
                assert!(theirs.is_none() || up.bytes.is_empty());
                return (ours, theirs);
            }
            // The server closed: whatever was on its way has come.
            (None, Some(None)) if down.bytes.is_empty() => {
                return (Err(client.closed(&[]).unwrap_err()), None);
            }
            // The client closed without a word.
            (Some(Err(error)), None) if up.bytes.is_empty() => return (Err(error), None),
            (o, t) => (ours, theirs) = (o, t),
        }
    }
    panic!("the handshake does not end");
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, cases: 1000, ..ProptestConfig::default()
    })]

    /// Whatever is offered and wanted, and however the bytes arrive, both sides agree.
    #[test]
    fn both_sides_agree(
        (fixed_newstyle, no_zeroes, structured, extended, meta_contexts) in any::<(bool, bool, bool, bool, bool)>(),
        (want_extended, want_structured, want_contexts, default_export) in any::<(bool, bool, bool, bool)>(),
        (name, description, block_size, known) in any::<(bool, bool, bool, bool)>(),
        tls in proptest::sample::select(vec![
            (Tls::Off, false), (Tls::Offered, false), (Tls::Offered, true), (Tls::Required, true),
        ]),
        cuts in proptest::collection::vec(any::<u8>(), 1..20),
    ) {
        let (tls, want_tls) = tls;
        let config = Config {
            fixed_newstyle, no_zeroes, structured, extended, meta_contexts, tls, ..Config::default()
        };
        let infos = Infos { name, description, block_size };
        let selected = ["x-test:one", "base:allocation", "nobody:knows"].map(str::to_owned);
        let wants = Wants {
            export: if !known { "nope" } else if default_export { "" } else { "a" }.to_owned(),
            contexts: if want_contexts { selected.to_vec() } else { Vec::new() },
            tls: want_tls,
            extended: want_extended,
            structured: want_structured,
            infos,
            end: End::Transmission,
        };
        let (ours, theirs) = negotiate(config, wants.clone(), &cuts);
        if want_tls && !fixed_newstyle {
            prop_assert!(ours.unwrap_err().to_string().contains("TLS is demanded"));
            return Ok(());
        }
        if !known {
            prop_assert!(theirs.is_none());
            let error = ours.unwrap_err().to_string();
            if fixed_newstyle {
                prop_assert_eq!(
                    error,
                    "the server refused export \"nope\": no such export \
                     (\"no export \\\"nope\\\" here\\u{1b}\")"
                );
            } else {
                prop_assert!(error.contains("instead of opening export \"nope\""), "{}", error);
            }
            return Ok(());
        }
        let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
        prop_assert_eq!(&ours.export, &theirs.export);
        prop_assert_eq!(ours.headers, theirs.headers);
        prop_assert_eq!(ours.replies, theirs.replies);
        prop_assert_eq!(&ours.contexts, &theirs.contexts);
        prop_assert_eq!(ours.info.flags, theirs.flags);
        prop_assert_eq!((ours.tls, theirs.tls), (want_tls, want_tls));

        // And what they agree on is what it should be.
        let replies = match fixed_newstyle {
            true if extended && want_extended => Replies::Extended,
            true if structured && want_structured => Replies::Structured,
            _ => Replies::Simple,
        };
        let extended = replies == Replies::Extended;
        prop_assert_eq!(ours.replies, replies);
        prop_assert_eq!(ours.headers, if extended { Headers::Extended } else { Headers::Compact });
        let with_contexts = replies != Replies::Simple && meta_contexts && want_contexts;
        let ids: Vec<u32> = ours.contexts.iter().map(|context| context.id).collect();
        prop_assert_eq!(ids, if with_contexts { vec![17, 4] } else { vec![] });
        let flags = FLAGS
            .with(ExportFlags::SEND_DF, replies != Replies::Simple)
            .with(ExportFlags::BLOCK_STATUS_PAYLOAD, extended && with_contexts);
        prop_assert_eq!(ours.info.flags, flags);
        prop_assert_eq!(ours.info.size, 1 << 40);
        let sizes = BlockSizes { minimum: 512, ..BlockSizes::DEFAULT };
        if fixed_newstyle {
            prop_assert_eq!(ours.protocol, Protocol::FixedNewstyle);
            prop_assert_eq!(ours.info.block_sizes, Some(sizes));
            prop_assert_eq!(theirs.obeys_block_sizes, block_size);
            prop_assert_eq!(ours.info.name, name.then(|| "a".to_owned()));
            prop_assert_eq!(ours.info.description, description.then(|| "the first".to_owned()));
        } else {
            prop_assert_eq!(ours.protocol, Protocol::Newstyle);
            prop_assert!(!theirs.obeys_block_sizes);
            prop_assert_eq!(ours.info.block_sizes, None);
        }
    }
}

/// A server and a client that talk at once: sends what `client` has put in `up`, and returns what
/// the client makes of the answers.
struct Talk {
    server: Server,
    client: Client,
    up: Vec<u8>,
    down: Vec<u8>,
    served: Option<server::Negotiated>,
}

impl Talk {
    fn new(config: Config) -> Talk {
        let mut down = Vec::new();
        let server = Server::new(config, &mut down);
        let mut talk = Talk { server, client: Client::new(), up: Vec::new(), down, served: None };
        assert_eq!(talk.event(), client::Event::Greeted(Protocol::FixedNewstyle));
        talk
    }

    fn ask(
        &mut self,
        option: impl FnOnce(&mut Client, &mut Vec<u8>) -> Result<(), Error>,
    ) -> client::Event {
        option(&mut self.client, &mut self.up).unwrap();
        self.event()
    }

    fn event(&mut self) -> client::Event {
        loop {
            let (used, event) = self.server.receive(&self.up, &mut self.down).unwrap();
            self.up.drain(..used);
            match event {
                server::Event::NeedMore { .. } | server::Event::Abort => break,
                server::Event::Transmission(negotiated) => {
                    self.served = Some(*negotiated);
                    break;
                }
                event => answer(&mut self.server, event, &mut self.down).unwrap(),
            }
        }
        let (used, event) = self.client.receive(&self.down, &mut self.up).unwrap();
        self.down.drain(..used);
        event
    }
}

fn refused(event: client::Event) -> OptionError {
    match event {
        client::Event::Refused { reason, .. } => reason,
        event => panic!("{event:?}"),
    }
}

fn names(event: client::Event) -> Vec<String> {
    match event {
        client::Event::Contexts(contexts) => contexts.into_iter().map(|c| c.name).collect(),
        client::Event::Listed(entries) => entries.into_iter().map(|e| e.name).collect(),
        event => panic!("{event:?}"),
    }
}

#[test]
fn options_in_any_order() {
    let mut talk = Talk::new(Config::default());
    assert_eq!(names(talk.ask(|c, out| c.list(out))), ["a", "b"]);
    // Contexts need structured replies.
    let event = talk.ask(|c, out| c.list_meta_contexts("a", &[], out));
    assert_eq!(refused(event), OptionError::Invalid);
    let event = talk.ask(|c, out| c.structured_replies(out));
    assert_eq!(event, client::Event::Accepted(OptionCode::StructuredReply));
    let event = talk.ask(|c, out| c.list_meta_contexts("a", &[], out));
    assert_eq!(names(event), ["base:allocation", "x-test:one"]);
    let client::Event::Info(info) = talk.ask(|c, out| c.info("b", Infos::ALL, out)) else {
        panic!("no information");
    };
    assert_eq!((info.size, info.block_sizes), (5, None));
    assert_eq!((info.name.as_deref(), info.description), (Some("b"), None));
    assert_eq!(info.flags, ExportFlags::HAS_FLAGS);
    // Extended headers replace structured replies.
    let event = talk.ask(|c, out| c.extended_headers(out));
    assert_eq!(event, client::Event::Accepted(OptionCode::ExtendedHeaders));
    let event = talk.ask(|c, out| c.info("a", Infos::default(), out));
    let client::Event::Info(info) = event else { panic!("{event:?}") };
    // In INFO always, contexts or not.
    assert!(info.flags.contains(ExportFlags::BLOCK_STATUS_PAYLOAD));
    let event = talk.ask(|c, out| c.starttls(out));
    assert_eq!(refused(event), OptionError::Unsupported);
    let event = talk.ask(|c, out| c.go("nope", Infos::default(), out));
    assert_eq!(refused(event), OptionError::Unknown);
    assert_eq!(talk.ask(|c, out| c.abort(out)), client::Event::Aborted);
}

#[test]
fn contexts_are_replaced_and_belong_to_their_export() {
    let query = |name: &str| vec![name.to_owned()];
    let select = |talk: &mut Talk, export: &str, queries: Vec<String>| {
        names(talk.ask(|c, out| c.set_meta_contexts(export, &queries, out)))
    };
    let go = |mut talk: Talk, export: &str| {
        let event = talk.ask(|c, out| c.go(export, Infos::default(), out));
        let client::Event::Transmission(negotiated) = event else { panic!("{event:?}") };
        let served = talk.served.unwrap();
        assert_eq!(served.contexts, negotiated.contexts);
        assert_eq!(served.flags, negotiated.info.flags);
        let flag = served.flags.contains(ExportFlags::BLOCK_STATUS_PAYLOAD);
        assert_eq!(flag, !served.contexts.is_empty());
        negotiated.contexts.into_iter().map(|c| c.name).collect::<Vec<_>>()
    };
    let talk = || {
        let mut talk = Talk::new(Config::default());
        talk.ask(|c, out| c.extended_headers(out));
        talk
    };

    // The last selection holds.
    let mut one = talk();
    assert_eq!(select(&mut one, "a", query("base:allocation")), ["base:allocation"]);
    assert_eq!(select(&mut one, "a", query("x-test:one")), ["x-test:one"]);
    assert_eq!(go(one, "a"), ["x-test:one"]);
    // No queries select nothing.
    let mut none = talk();
    select(&mut none, "a", query("base:allocation"));
    assert!(select(&mut none, "a", vec![]).is_empty());
    assert!(go(none, "a").is_empty());
    // Another export has none of it, not even under another name of the same.
    let mut other = talk();
    select(&mut other, "a", query("base:allocation"));
    assert!(go(other, "").is_empty());
    // For ever the same costs no memory, only options.
    let mut many = talk();
    for _ in 0..limits::OPTIONS - 2 {
        select(&mut many, "a", query("base:allocation"));
    }
    assert_eq!(go(many, "a"), ["base:allocation"]);
}

#[test]
fn tls_forgets_what_was_negotiated() {
    let mut talk = Talk::new(Config { tls: Tls::Offered, ..Config::default() });
    talk.ask(|c, out| c.extended_headers(out));
    let queries = ["base:allocation".to_owned()];
    talk.ask(|c, out| c.set_meta_contexts("a", &queries, out));
    assert_eq!(talk.ask(|c, out| c.starttls(out)), client::Event::StartTls);
    talk.client.tls_started().unwrap();
    assert_eq!(talk.client.headers(), Headers::Compact);
    let client::Event::Transmission(negotiated) =
        talk.ask(|c, out| c.go("a", Infos::default(), out))
    else {
        panic!("no transmission");
    };
    assert!(negotiated.tls && negotiated.contexts.is_empty());
    assert_eq!(negotiated.replies, Replies::Simple);
    let served = talk.served.unwrap();
    assert!(served.tls && served.contexts.is_empty() && served.replies == Replies::Simple);
}

#[test]
fn nothing_goes_before_tls_where_it_is_required() {
    let mut talk = Talk::new(Config { tls: Tls::Required, ..Config::default() });
    for event in [
        talk.ask(|c, out| c.list(out)),
        talk.ask(|c, out| c.extended_headers(out)),
        talk.ask(|c, out| c.go("a", Infos::default(), out)),
    ] {
        assert_eq!(refused(event), OptionError::TlsRequired);
    }
    assert_eq!(talk.ask(|c, out| c.starttls(out)), client::Event::StartTls);
    talk.client.tls_started().unwrap();
    assert_eq!(names(talk.ask(|c, out| c.list(out))), ["a", "b"]);
    assert!(talk.client.starttls(&mut Vec::new()).is_err());
    // A second STARTTLS is refused by the server, too.
    option(OptionCode::StartTls, &[], &mut talk.up);
    talk.server.receive(&talk.up, &mut talk.down).unwrap();
    assert_eq!(replies(&talk.down), [(OptionCode::StartTls, OptionError::Invalid)]);
    // EXPORT_NAME cannot be refused.
    let (result, _) = converse(Config { tls: Tls::Required, ..Config::default() }, 3, &[(1, b"a")]);
    assert!(matches!(result, Err(Error::CannotRefuse { .. })), "{result:?}");
    let wants = Wants::new("a");
    let (ours, _) = negotiate(Config { tls: Tls::Required, ..Config::default() }, wants, &[50]);
    let error = ours.unwrap_err().to_string();
    assert!(error.contains("TLS is required"), "{error}");
}

#[test]
fn a_stopping_server_refuses_politely() {
    let mut talk = Talk::new(Config::default());
    talk.server.stop();
    assert_eq!(refused(talk.ask(|c, out| c.list(out))), OptionError::Shutdown);
    let event = talk.ask(|c, out| c.go("a", Infos::default(), out));
    assert_eq!(refused(event), OptionError::Shutdown);
    assert_eq!(talk.ask(|c, out| c.abort(out)), client::Event::Aborted);
}

fn option(code: OptionCode, payload: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&OptionHeader { code, length: payload.len() as u32 }.encode());
    out.extend_from_slice(payload);
}

/// The refusals among a server's replies.
fn replies(mut bytes: &[u8]) -> Vec<(OptionCode, OptionError)> {
    let mut found = Vec::new();
    while let Ok(Some(head)) = OptionReplyHeader::parse(bytes) {
        bytes = &bytes[OptionReplyHeader::LEN + head.length as usize..];
        if let ReplyCode::Error(error) = head.code {
            found.push((head.option, error));
        }
    }
    assert!(bytes.is_empty(), "{bytes:?}");
    found
}

type Conversation = (Result<Option<server::Negotiated>, Error>, Vec<(OptionCode, OptionError)>);

/// What a server makes of a client's flags and options, and what it refuses.
fn converse(config: Config, flags: u32, options: &[(u32, &[u8])]) -> Conversation {
    let mut input = flags.to_be_bytes().to_vec();
    for (code, payload) in options {
        option(OptionCode::from_wire(*code), payload, &mut input);
    }
    let (mut out, mut used) = (Vec::new(), 0);
    let mut server = Server::new(config, &mut out);
    out.clear();
    let mut run = || loop {
        let (consumed, event) = server.receive(&input[used..], &mut out)?;
        used += consumed;
        match event {
            server::Event::NeedMore { .. } | server::Event::Abort => return Ok(None),
            server::Event::Transmission(negotiated) => return Ok(Some(*negotiated)),
            event => answer(&mut server, event, &mut out)?,
        }
    };
    let result = run();
    let raw = matches!(&result, Ok(Some(_))) && options.last().is_some_and(|last| last.0 == 1);
    let refusals = if raw { Vec::new() } else { replies(&out) };
    (result, refusals)
}

#[test]
fn clients_flags_are_checked() {
    let config = Config::default();
    assert!(converse(config, 4, &[]).0.is_err());
    assert!(converse(Config { no_zeroes: false, ..config }, 3, &[]).0.is_err());
    assert!(converse(Config { fixed_newstyle: false, ..config }, 1, &[]).0.is_err());
    // Without fixed newstyle only EXPORT_NAME is taken.
    for code in [2, 3, 6, 7, 11, 99] {
        assert!(converse(config, 2, &[(code, &[])]).0.is_err(), "{code}");
    }
    assert!(converse(config, 2, &[(1, b"a")]).0.unwrap().is_some());
}

#[test]
fn export_name_has_zeroes_unless_they_are_declined() {
    for (flags, len) in [(1u32, 134), (3, 10)] {
        let mut out = Vec::new();
        let mut server = Server::new(Config::default(), &mut out);
        let mut input = flags.to_be_bytes().to_vec();
        option(OptionCode::ExportName, b"a", &mut input);
        out.clear();
        let (_, event) = server.receive(&input, &mut out).unwrap();
        answer(&mut server, event, &mut out).unwrap();
        let (_, event) = server.receive(&[], &mut out).unwrap();
        assert!(matches!(event, server::Event::Transmission(_)));
        assert_eq!(out.len(), len);
        // Without structured replies DF is not offered.
        let flags = FLAGS.without(ExportFlags::SEND_DF).bits().to_be_bytes();
        assert_eq!(out[..10], [&(1u64 << 40).to_be_bytes()[..], &flags].concat());
        assert!(out[10..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn malformed_and_unknown_options_are_refused_and_survived() {
    use OptionCode::{
        ExtendedHeaders, Go, Info, List, ListMetaContext, Other, SetMetaContext, StructuredReply,
    };
    use OptionError::{ExtendedHeadersRequired, Invalid, TooBig, Unknown, Unsupported};
    let many = limits::QUERIES as u32 + 1;
    let many = [&[0; 4][..], &many.to_be_bytes(), &vec![0; 4 * many as usize]].concat();
    let long = vec![b'x'; limits::OPTION_PAYLOAD + 1];
    let mut nope = Vec::new();
    InfoRequest { name: "nope".to_owned(), wants: Infos::ALL }.emit(&mut nope);
    let (result, refusals) = converse(
        Config::default(),
        3,
        &[
            (99, b"anything"),
            (magic::OPT_PEEK_EXPORT, b""),
            (99, &long),
            (3, b"data"),
            (6, b"bad"),
            (7, b"\0\0\0\x05hell"),
            (7, &long),
            (7, &nope),
            (9, b"\0\0\0\0\0\0\0\0"),
            (8, b"data"),
            (8, b""),
            (8, b""),
            (11, b"data"),
            (11, b""),
            (11, b""),
            (8, b""),
            (9, b"bad"),
            (10, &many),
            (10, b"\0\0\0\0\0\0\0\x01\0\0\0\x02x"),
            (2, &long[..5000]),
        ],
    );
    assert_eq!(result, Ok(None));
    assert_eq!(
        refusals,
        [
            (Other(99), Unsupported),
            (Other(4), Unsupported),
            (Other(99), Unsupported),
            (List, Invalid),
            (Info, Invalid),
            (Go, Invalid),
            (Go, TooBig),
            (Go, Unknown),
            (ListMetaContext, Invalid),
            (StructuredReply, Invalid),
            (StructuredReply, Invalid),
            (ExtendedHeaders, Invalid),
            (ExtendedHeaders, Invalid),
            (StructuredReply, ExtendedHeadersRequired),
            (ListMetaContext, Invalid),
            (SetMetaContext, TooBig),
            (SetMetaContext, Invalid),
        ]
    );
}

#[test]
fn what_is_not_offered_is_not_known() {
    let config =
        Config { structured: false, extended: false, meta_contexts: false, ..Config::default() };
    let (_, refusals) = converse(config, 3, &[(8, b""), (11, b""), (9, b""), (10, b"")]);
    assert!(refusals.iter().all(|(_, error)| *error == OptionError::Unsupported));
    assert_eq!(refusals.len(), 4);
}

#[test]
fn export_name_cannot_follow_extended_headers_or_be_malformed() {
    for options in [
        &[(11, &b""[..]), (1, b"a")][..],
        &[(1, b"nope")],
        &[(1, b"\xff")],
        &[(1, &[b'a'; 4097])],
        &[(1, &[b'a'; limits::OPTION_PAYLOAD + 1])],
    ] {
        let (result, _) = converse(Config::default(), 3, options);
        assert!(matches!(result, Err(Error::CannotRefuse { .. })), "{result:?}");
    }
}

#[test]
fn a_failed_selection_selects_nothing() {
    let mut select = Vec::new();
    let queries = vec!["base:allocation".to_owned()];
    MetaRequest { export: "a".to_owned(), queries }.emit(&mut select);
    let mut go = Vec::new();
    InfoRequest { name: "a".to_owned(), wants: Infos::default() }.emit(&mut go);
    let (good, _) = converse(Config::default(), 3, &[(11, b""), (10, &select), (7, &go)]);
    assert_eq!(good.unwrap().unwrap().contexts.len(), 1);
    let long = vec![0; limits::OPTION_PAYLOAD + 1];
    for bad in [&b"bad"[..], &long] {
        let options = [(11, &b""[..]), (10, &select), (10, bad), (7, &go)];
        let (result, refusals) = converse(Config::default(), 3, &options);
        assert_eq!(refusals.len(), 1);
        assert!(result.unwrap().unwrap().contexts.is_empty());
    }
}

#[test]
fn block_sizes_can_be_required() {
    let answer = || Ok(ExportInfo { require_block_sizes: true, ..export("a").unwrap() });
    for (wants, go) in [(Infos::default(), false), (Infos::BLOCK_SIZE, true)] {
        let mut out = Vec::new();
        let mut server = Server::new(Config::default(), &mut out);
        let mut payload = Vec::new();
        InfoRequest { name: "a".to_owned(), wants }.emit(&mut payload);
        let mut input = 3u32.to_be_bytes().to_vec();
        option(OptionCode::Go, &payload, &mut input);
        out.clear();
        server.receive(&input, &mut out).unwrap();
        server.answer_export(answer(), &mut out).unwrap();
        // The sizes are told in any case.
        let sizes = [&3u16.to_be_bytes()[..], &512u32.to_be_bytes()].concat();
        assert!(out.windows(sizes.len()).any(|window| window == sizes));
        let (_, event) = server.receive(&[], &mut out).unwrap();
        match event {
            server::Event::Transmission(negotiated) => assert!(go && negotiated.obeys_block_sizes),
            _ => {
                assert!(!go);
                assert_eq!(replies(&out), [(OptionCode::Go, OptionError::BlockSizeRequired)]);
            }
        }
    }
}

#[test]
fn floods_end_the_session() {
    let flood = vec![(99, &b""[..]); limits::OPTIONS as usize + 1];
    let (result, refusals) = converse(Config::default(), 3, &flood);
    assert!(matches!(result, Err(Error::TooLong { .. })), "{result:?}");
    assert_eq!(refusals.len(), limits::OPTIONS as usize);
    // Each export of a list earns the client some more, once.
    let mut flood = vec![(3, &b""[..]); 10];
    flood.resize(limits::OPTIONS as usize + 3 * limits::OPTIONS_PER_EXPORT as usize, (99, b""));
    let (result, refusals) = converse(Config::default(), 3, &flood);
    assert!(matches!(result, Err(Error::TooLong { .. })), "{result:?}");
    let more = 2 * limits::OPTIONS_PER_EXPORT;
    assert_eq!(refusals.len() as u32, limits::OPTIONS + more - 10);
    // A payload beyond all measure is not even skipped.
    let mut out = Vec::new();
    let mut server = Server::new(Config::default(), &mut out);
    let mut input = 3u32.to_be_bytes().to_vec();
    let head = OptionHeader { code: OptionCode::Go, length: limits::OPTION_SKIP + 1 };
    input.extend_from_slice(&head.encode());
    assert!(matches!(server.receive(&input, &mut out), Err(Error::TooLong { .. })));
}

#[test]
fn bytes_behind_starttls_are_an_attack() {
    let config = Config { tls: Tls::Offered, ..Config::default() };
    let (result, _) = converse(config, 3, &[(5, b""), (7, b"\0\0\0\0\0\0")]);
    assert!(matches!(result, Err(Error::Unexpected { .. })), "{result:?}");

    let mut talk = Talk::new(config);
    talk.client.starttls(&mut talk.up).unwrap();
    talk.server.receive(&talk.up, &mut talk.down).unwrap();
    talk.down.push(0);
    let error = talk.client.receive(&talk.down, &mut talk.up).unwrap_err();
    assert!(error.to_string().contains("behind its answer to STARTTLS"), "{error}");
}

#[test]
fn the_callers_mistakes_are_told() {
    let mut out = Vec::new();
    let mut server = Server::new(Config::default(), &mut out);
    let caller = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::Caller { .. })), "{result:?}");
    };
    caller(server.answer_list(Ok(&[]), &mut out));
    caller(server.answer_export(export("a"), &mut out));
    caller(server.answer_contexts(Ok(vec![]), &mut out));
    caller(server.tls_started());
    let mut input = 3u32.to_be_bytes().to_vec();
    option(OptionCode::List, &[], &mut input);
    let mut server = Server::new(Config::default(), &mut out);
    assert_eq!(server.receive(&input, &mut out), Ok((20, server::Event::List)));
    caller(server.receive(&[], &mut out).map(|_| ()));

    let mut client = Client::new();
    caller(client.list(&mut out));
    caller(client.export_name("a", &mut out));
    caller(client.tls_started());
    let long = "x".repeat(4097);
    let mut talk = Talk::new(Config::default());
    assert!(talk.client.go(&long, Infos::ALL, &mut out).is_err());
    assert!(talk.client.go("a\0", Infos::ALL, &mut out).is_err());
    caller(talk.client.set_meta_contexts("a", &[], &mut out));
    talk.ask(|c, out| c.extended_headers(out));
    caller(talk.client.export_name("a", &mut out));
    caller(talk.client.structured_replies(&mut out));
    let many = vec![String::new(); limits::QUERIES + 1];
    assert!(talk.client.set_meta_contexts("a", &many, &mut out).is_err());
}

/// What a client makes of a server's bytes, with one option sent after the greeting.
fn hear(
    bytes: &[u8],
    send: impl FnOnce(&mut Client, &mut Vec<u8>) -> Result<(), Error>,
) -> Result<client::Event, Error> {
    let mut out = Vec::new();
    let mut client = Client::new();
    let greeting = [&b"NBDMAGICIHAVEOPT"[..], &[0, 3]].concat();
    client.receive(&greeting, &mut out).unwrap();
    send(&mut client, &mut out).unwrap();
    client.receive(bytes, &mut out).map(|(_, event)| event)
}

fn reply(option: OptionCode, code: ReplyCode, payload: &[u8]) -> Vec<u8> {
    let length = payload.len() as u32;
    [&OptionReplyHeader { option, code, length }.encode()[..], payload].concat()
}

#[test]
fn who_is_no_server_is_told_apart() {
    let hear = |bytes: &[u8]| Client::new().receive(bytes, &mut Vec::new());
    for (bytes, shown) in [
        (&b"SSH-2.0-OpenSSH_9.2\r\n"[..], "SSH-2.0-OpenSSH_"),
        (b"HTTP/1.1 400 Bad\r\n", "HTTP/1.1 400 Bad"),
        (b"NBDMAGICIHAVENOT", "NBDMAGICIHAVENOT"),
        (b"\r\n", "\\r\\n"),
    ] {
        let error = hear(bytes).unwrap_err().to_string();
        assert_eq!(error, format!("not an NBD server: its greeting was \"{shown}\""));
    }
    assert!(matches!(hear(b"NBDMA"), Ok((0, client::Event::NeedMore { .. }))));
    let error = Client::new().closed(&[]).unwrap_err().to_string();
    assert!(error.contains("closed before a greeting"), "{error}");
    let error = Client::new().closed(b"NBDM").unwrap_err().to_string();
    assert!(error.contains("\"NBDM\""), "{error}");
}

#[test]
fn a_servers_replies_are_checked() {
    use OptionCode::{Go, List, SetMetaContext};
    let list = |c: &mut Client, out: &mut Vec<u8>| c.list(out);
    let go = |c: &mut Client, out: &mut Vec<u8>| c.go("a", Infos::ALL, out);
    for (bytes, why) in [
        (reply(Go, ReplyCode::Ack, &[]), "answered GO, LIST was sent"),
        (reply(List, ReplyCode::Info, &[]), "answered LIST with Info"),
        (reply(List, ReplyCode::Other(9), &[]), "answered LIST with Other(9)"),
        (reply(List, ReplyCode::Ack, b"x"), "has a payload"),
        (reply(List, ReplyCode::Server, b"\0\0\0\x09a"), "longer than the reply"),
        (vec![0; 20], "wrong magic"),
    ] {
        let error = hear(&bytes, list).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let error = hear(&reply(Go, ReplyCode::Ack, &[]), go).unwrap_err().to_string();
    assert!(error.contains("size and flags are missing"), "{error}");
    let head = OptionReplyHeader {
        option: List,
        code: ReplyCode::Server,
        length: limits::OPTION_REPLY as u32 + 1,
    };
    assert!(matches!(hear(&head.encode(), list), Err(Error::TooLong { .. })));

    // Lists have ends.
    let entry = reply(List, ReplyCode::Server, b"\0\0\0\x01a");
    let most = entry.repeat(limits::EXPORTS);
    assert!(hear(&most, list).is_ok());
    assert!(matches!(hear(&[most, entry].concat(), list), Err(Error::TooLong { .. })));
    let big = reply(List, ReplyCode::Server, &[&[0; 4][..], &[b'x'; 4096]].concat());
    let many = big.repeat(limits::LIST_BYTES / 4096 + 1);
    assert!(matches!(hear(&many, list), Err(Error::TooLong { .. })));
    let info = reply(Go, ReplyCode::Info, &[0, 9]);
    assert!(hear(&info.repeat(limits::INFOS), go).is_err());

    // A context's number names one context.
    let twice = reply(SetMetaContext, ReplyCode::MetaContext, b"\0\0\0\x01base:x").repeat(2);
    let mut out = Vec::new();
    let mut talk = Talk::new(Config::default());
    talk.ask(|c, out| c.structured_replies(out));
    talk.client.set_meta_contexts("a", &["base:x".to_owned()], &mut out).unwrap();
    let error = talk.client.receive(&twice, &mut out).unwrap_err().to_string();
    assert!(error.contains("same number"), "{error}");
}

#[test]
fn strange_information_is_tamed() {
    use OptionCode::Go;
    let go = |c: &mut Client, out: &mut Vec<u8>| c.go("a", Infos::ALL, out);
    let info = |bytes: &[u8]| reply(Go, ReplyCode::Info, bytes);
    let bytes = [
        // Flags that make no sense without structured replies and WRITE_ZEROES.
        info(&[&[0, 0][..], &9u64.to_be_bytes(), &[0x18, 0x81]].concat()),
        info(&[0, 3, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 5]),
        info(b"\0\x02evil \x1b[2J"),
        info(b"\x99\x99what"),
        reply(Go, ReplyCode::Ack, &[]),
    ]
    .concat();
    let client::Event::Transmission(negotiated) = hear(&bytes, go).unwrap() else {
        panic!("no transmission");
    };
    let info = negotiated.info;
    assert_eq!(info.flags, ExportFlags::HAS_FLAGS);
    assert_eq!((info.size, info.block_sizes), (9, None));
    assert_eq!(info.description.as_deref(), Some("evil \\u{1b}[2J"));

    let text = [b'x'; 5000];
    let bytes = reply(Go, ReplyCode::Error(OptionError::Unknown), &text);
    let client::Event::Refused { text, .. } = hear(&bytes, go).unwrap() else {
        panic!("not refused");
    };
    assert_eq!(text.len(), limits::ERROR_TEXT + 3);
}

#[test]
fn old_servers_are_spoken_to() {
    // A fixed newstyle server that knows nothing but EXPORT_NAME.
    let refuse = |option| reply(option, ReplyCode::Error(OptionError::Unsupported), &[]);
    let mut bytes = [&b"NBDMAGICIHAVEOPT"[..], &[0, 1]].concat();
    for option in [OptionCode::ExtendedHeaders, OptionCode::StructuredReply, OptionCode::Go] {
        bytes.extend(refuse(option));
    }
    bytes.extend_from_slice(&77u64.to_be_bytes());
    bytes.extend_from_slice(&[0, 1]);
    bytes.extend_from_slice(&[0; 124]);
    let mut out = Vec::new();
    let mut negotiation = Negotiation::new(Wants::new("disk")).unwrap();
    let (used, step) = negotiation.receive(&bytes, &mut out).unwrap();
    assert_eq!(used, bytes.len());
    let Step::Transmission(negotiated) = step else { panic!("{step:?}") };
    assert_eq!((negotiated.info.size, negotiated.replies), (77, Replies::Simple));
    assert!(out.ends_with(b"IHAVEOPT\0\0\0\x01\0\0\0\x04disk"));
    // The zeroes were not declined, for the server did not offer that.
    assert_eq!(out[..4], [0, 0, 0, 1]);

    // An oldstyle server.
    let mut bytes = Vec::new();
    server::oldstyle(88, FLAGS, &mut bytes);
    assert_eq!(bytes.len(), 152);
    let mut negotiation = Negotiation::new(Wants::new("ignored")).unwrap();
    let (used, step) = negotiation.receive(&bytes, &mut out).unwrap();
    let Step::Transmission(negotiated) = step else { panic!("{step:?}") };
    assert_eq!((used, negotiated.info.size), (152, 88));
    assert_eq!(negotiated.protocol, Protocol::Oldstyle);
    assert_eq!(negotiated.info.flags, FLAGS.without(ExportFlags::SEND_DF));
}

#[test]
fn a_demand_for_tls_is_never_given_up() {
    let mut oldstyle = Vec::new();
    server::oldstyle(88, FLAGS, &mut oldstyle);
    let greeting = |flags: &[u8]| [&b"NBDMAGICIHAVEOPT"[..], flags].concat();
    let newstyle = greeting(&[0, 0]);
    for (bytes, said) in [(oldstyle, 0), (newstyle, 4)] {
        for end in [End::Options, End::Transmission] {
            let wants = Wants { tls: true, end, ..Wants::new("a") };
            let mut out = Vec::new();
            let mut negotiation = Negotiation::new(wants).unwrap();
            let error = negotiation.receive(&bytes, &mut out).unwrap_err();
            assert!(error.to_string().contains("TLS is demanded"), "{error}");
            assert_eq!(out.len(), said);
        }
    }
    // Refused: the session ends politely, and no other option goes out but that end.
    let errors = [OptionError::Unsupported, OptionError::Policy, OptionError::Invalid];
    for refusal in errors {
        let refused = reply(OptionCode::StartTls, ReplyCode::Error(refusal), &[]);
        let bytes = [greeting(&[0, 3]), refused].concat();
        let mut out = Vec::new();
        let mut negotiation = Negotiation::new(Wants { tls: true, ..Wants::new("a") }).unwrap();
        let error = negotiation.receive(&bytes, &mut out).unwrap_err();
        assert!(error.to_string().contains("STARTTLS"), "{error}");
        let mut due = vec![0, 0, 0, 3];
        option(OptionCode::StartTls, &[], &mut due);
        option(OptionCode::Abort, &[], &mut due);
        assert_eq!(out, due);
    }
}

#[test]
fn a_negotiation_can_stop_before_the_export_is_chosen() {
    let mut down = Vec::new();
    let mut server = Server::new(Config::default(), &mut down);
    let wants = Wants { end: End::Options, ..Wants::new("a") };
    let mut negotiation = Negotiation::new(wants).unwrap();
    let mut up = Vec::new();
    loop {
        let (used, step) = negotiation.receive(&down, &mut up).unwrap();
        down.drain(..used);
        if step == Step::Options {
            break;
        }
        let (used, _) = server.receive(&up, &mut down).unwrap();
        up.drain(..used);
    }
    let mut client = negotiation.into_handshake();
    assert_eq!(client.headers(), Headers::Extended);
    assert_eq!(client.protocol(), Some(Protocol::FixedNewstyle));
    client.list(&mut up).unwrap();
    let (_, event) = server.receive(&up, &mut down).unwrap();
    answer(&mut server, event, &mut down).unwrap();
    let (_, event) = client.receive(&down, &mut up).unwrap();
    assert_eq!(names(event), ["a", "b"]);
}
