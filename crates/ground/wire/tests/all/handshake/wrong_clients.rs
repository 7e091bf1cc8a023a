//! A server's reactions to clients that violate the rules.

use blockhaul_wire::handshake::client;
use blockhaul_wire::handshake::negotiation::NegotiationOptions;
use blockhaul_wire::handshake::server::{
    self, ExportReply, HandshakeConfig, ServerHandshake as Server, TlsRequirement,
};
use blockhaul_wire::option::{
    InfoRequest, MetaRequest, OptionHeader, OptionReplyHeader, ReplyCode,
};
use blockhaul_wire::{ExportFlags, InfoSet, OptionCode, OptionError, ProtocolError, limits, magic};

use super::agreement::negotiate;
use super::{FLAGS, Talk, answer, export, names, option, refused};

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

type Conversation =
    (Result<Option<server::ServerHandshakeResult>, ProtocolError>, Vec<(OptionCode, OptionError)>);

/// A server's reaction to a client's flags and options, and what it refuses.
fn converse(config: HandshakeConfig, flags: u32, options: &[(u32, &[u8])]) -> Conversation {
    let mut input = flags.to_be_bytes().to_vec();
    for (code, payload) in options {
        option(OptionCode::from_wire(*code), payload, &mut input);
    }
    let mut out = Vec::new();
    let mut used = 0;
    let mut server = Server::new(config, &mut out);
    out.clear();
    let mut run = || loop {
        let (consumed, event) = server.receive(&input[used..], &mut out)?;
        used += consumed;
        match event {
            server::ServerHandshakeEvent::NeedMore { .. } | server::ServerHandshakeEvent::Abort => {
                return Ok(None);
            }
            server::ServerHandshakeEvent::Transmission(negotiated) => return Ok(Some(*negotiated)),
            event => answer(&mut server, event, &mut out)?,
        }
    };
    let result = run();
    let raw = matches!(&result, Ok(Some(_))) && options.last().is_some_and(|last| last.0 == 1);
    let refusals = if raw { Vec::new() } else { replies(&out) };
    (result, refusals)
}

// nbd: handshake.client-flags-match, handshake.options-need-fixed, tls.fixed-newstyle
#[test]
fn clients_flags_are_checked() {
    let config = HandshakeConfig::default();
    assert!(converse(config, 4, &[]).0.is_err());
    assert!(converse(HandshakeConfig { no_zeroes: false, ..config }, 3, &[]).0.is_err());
    assert!(converse(HandshakeConfig { fixed_newstyle: false, ..config }, 1, &[]).0.is_err());
    // Without fixed newstyle only EXPORT_NAME is accepted.
    for code in [2, 3, 6, 7, 11, 99] {
        assert!(converse(config, 2, &[(code, &[])]).0.is_err(), "{code}");
    }
    assert!(converse(config, 2, &[(1, b"a")]).0.unwrap().is_some());
}

// nbd: handshake.no-zeroes, flags.has-flags, flags.df-clear
#[test]
fn export_name_has_zeroes_unless_they_are_declined() {
    for (flags, len) in [(1u32, 134), (3, 10)] {
        let mut out = Vec::new();
        let mut server = Server::new(HandshakeConfig::default(), &mut out);
        let mut input = flags.to_be_bytes().to_vec();
        option(OptionCode::ExportName, b"a", &mut input);
        out.clear();
        let (_, event) = server.receive(&input, &mut out).unwrap();
        answer(&mut server, event, &mut out).unwrap();
        let (_, event) = server.receive(&[], &mut out).unwrap();
        assert!(matches!(event, server::ServerHandshakeEvent::Transmission(_)));
        assert_eq!(out.len(), len);
        // Without structured replies DF is not offered.
        let flags = FLAGS.without(ExportFlags::SEND_DF).bits().to_be_bytes();
        assert_eq!(out[..10], [&(1u64 << 40).to_be_bytes()[..], &flags].concat());
        assert!(out[10..].iter().all(|byte| *byte == 0));
    }
}

// nbd: abort.data, list.data-refused, structured.data-refused, meta.malformed
// nbd: reply.unsupported, baseline.unsupported, extended.data-refused
// nbd: extended.structured-refused
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
    InfoRequest { name: "nope".to_owned(), wants: InfoSet::ALL }.emit(&mut nope);
    let (result, refusals) = converse(
        HandshakeConfig::default(),
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
    let config = HandshakeConfig {
        structured: false,
        extended: false,
        meta_contexts: false,
        ..HandshakeConfig::default()
    };
    let (_, refusals) = converse(config, 3, &[(8, b""), (11, b""), (9, b""), (10, b"")]);
    assert!(refusals.iter().all(|(_, error)| *error == OptionError::Unsupported));
    assert_eq!(refusals.len(), 4);
}

// nbd: handshake.export-name-refused, export-name.terminate
#[test]
fn export_name_cannot_follow_extended_headers_or_be_malformed() {
    for options in [
        &[(11, &b""[..]), (1, b"a")][..],
        &[(1, b"nope")],
        &[(1, b"\xff")],
        &[(1, &[b'a'; 4097])],
        &[(1, &[b'a'; limits::OPTION_PAYLOAD + 1])],
    ] {
        let (result, _) = converse(HandshakeConfig::default(), 3, options);
        assert!(matches!(result, Err(ProtocolError::CannotRefuse { .. })), "{result:?}");
    }
}

// nbd: meta.set-replaces
#[test]
fn a_failed_selection_selects_nothing() {
    let mut select = Vec::new();
    let queries = vec!["base:allocation".to_owned()];
    MetaRequest { export: "a".to_owned(), queries }.emit(&mut select);
    let mut go = Vec::new();
    InfoRequest { name: "a".to_owned(), wants: InfoSet::default() }.emit(&mut go);
    let (good, _) = converse(HandshakeConfig::default(), 3, &[(11, b""), (10, &select), (7, &go)]);
    assert_eq!(good.unwrap().unwrap().contexts.len(), 1);
    let long = vec![0; limits::OPTION_PAYLOAD + 1];
    for bad in [&b"bad"[..], &long] {
        let options = [(11, &b""[..]), (10, &select), (10, bad), (7, &go)];
        let (result, refusals) = converse(HandshakeConfig::default(), 3, &options);
        assert_eq!(refusals.len(), 1);
        assert!(result.unwrap().unwrap().contexts.is_empty());
    }
}

// nbd: sizes.advertised, info.no-assumption, info.export, info.block-size-reqd
// nbd: info.sizes-requested
#[test]
fn block_sizes_can_be_required() {
    let answer = || Ok(ExportReply { require_block_sizes: true, ..export("a").unwrap() });
    for (wants, go) in [(InfoSet::default(), false), (InfoSet::BLOCK_SIZE, true)] {
        let mut out = Vec::new();
        let mut server = Server::new(HandshakeConfig::default(), &mut out);
        let mut payload = Vec::new();
        InfoRequest { name: "a".to_owned(), wants }.emit(&mut payload);
        let mut input = 3u32.to_be_bytes().to_vec();
        option(OptionCode::Go, &payload, &mut input);
        out.clear();
        server.receive(&input, &mut out).unwrap();
        server.answer_export(answer(), &mut out).unwrap();
        // The sizes are sent in any case.
        let sizes = [&3u16.to_be_bytes()[..], &512u32.to_be_bytes()].concat();
        assert!(out.windows(sizes.len()).any(|window| window == sizes));
        let (_, event) = server.receive(&[], &mut out).unwrap();
        match event {
            server::ServerHandshakeEvent::Transmission(negotiated) => {
                assert!(go && negotiated.obeys_block_sizes)
            }
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
    let (result, refusals) = converse(HandshakeConfig::default(), 3, &flood);
    assert!(matches!(result, Err(ProtocolError::TooLong { .. })), "{result:?}");
    assert_eq!(refusals.len(), limits::OPTIONS as usize);
    // Each listed export allows the client some more options, once.
    let mut flood = vec![(3, &b""[..]); 10];
    flood.resize(limits::OPTIONS as usize + 3 * limits::OPTIONS_PER_EXPORT as usize, (99, b""));
    let (result, refusals) = converse(HandshakeConfig::default(), 3, &flood);
    assert!(matches!(result, Err(ProtocolError::TooLong { .. })), "{result:?}");
    let more = 2 * limits::OPTIONS_PER_EXPORT;
    assert_eq!(refusals.len() as u32, limits::OPTIONS + more - 10);
    // An excessive payload is not even skipped.
    let mut out = Vec::new();
    let mut server = Server::new(HandshakeConfig::default(), &mut out);
    let mut input = 3u32.to_be_bytes().to_vec();
    let head = OptionHeader { code: OptionCode::Go, length: limits::OPTION_SKIP + 1 };
    input.extend_from_slice(&head.encode());
    assert!(matches!(server.receive(&input, &mut out), Err(ProtocolError::TooLong { .. })));
}

// nbd: tls.mode, tls.starttls-accepted, tls.starttls-twice, tls.reqd, tls.reqd-export-name
// nbd: tls.reqd-go, tls.no-reqd-after, tls.client-starttls-once, info.forced-tls
#[test]
fn nothing_goes_before_tls_where_it_is_required() {
    let mut talk =
        Talk::new(HandshakeConfig { tls: TlsRequirement::Required, ..HandshakeConfig::default() });
    for event in [
        talk.ask(|c, out| c.list(out)),
        talk.ask(|c, out| c.extended_headers(out)),
        talk.ask(|c, out| c.go("a", InfoSet::default(), out)),
    ] {
        assert_eq!(refused(event), OptionError::TlsRequired);
    }
    assert_eq!(talk.ask(|c, out| c.starttls(out)), client::ClientHandshakeEvent::StartTls);
    talk.client.tls_started().unwrap();
    assert_eq!(names(talk.ask(|c, out| c.list(out))), ["a", "b"]);
    assert!(talk.client.starttls(&mut Vec::new()).is_err());
    // A second STARTTLS is refused by the server, too.
    option(OptionCode::StartTls, &[], &mut talk.up);
    talk.server.receive(&talk.up, &mut talk.down).unwrap();
    assert_eq!(replies(&talk.down), [(OptionCode::StartTls, OptionError::Invalid)]);
    // EXPORT_NAME cannot be refused.
    let (result, _) = converse(
        HandshakeConfig { tls: TlsRequirement::Required, ..HandshakeConfig::default() },
        3,
        &[(1, b"a")],
    );
    assert!(matches!(result, Err(ProtocolError::CannotRefuse { .. })), "{result:?}");
    let wants = NegotiationOptions::new("a");
    let (ours, _) = negotiate(
        HandshakeConfig { tls: TlsRequirement::Required, ..HandshakeConfig::default() },
        wants,
        &[50],
    );
    let error = ours.unwrap_err().to_string();
    assert!(error.contains("TLS is required"), "{error}");
}

// nbd: tls.all-after, tls.client-upgrades
#[test]
fn bytes_behind_starttls_are_an_attack() {
    let config = HandshakeConfig { tls: TlsRequirement::Offered, ..HandshakeConfig::default() };
    let (result, _) = converse(config, 3, &[(5, b""), (7, b"\0\0\0\0\0\0")]);
    assert!(matches!(result, Err(ProtocolError::Unexpected { .. })), "{result:?}");

    let mut talk = Talk::new(config);
    talk.client.starttls(&mut talk.up).unwrap();
    talk.server.receive(&talk.up, &mut talk.down).unwrap();
    talk.down.push(0);
    let error = talk.client.receive(&talk.down, &mut talk.up).unwrap_err();
    assert!(error.to_string().contains("behind its answer to STARTTLS"), "{error}");
}
