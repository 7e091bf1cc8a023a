//! Rules of the protocol document that no other test of the handshake checks.

use blockhaul_wire::handshake::GreetingForm;
use blockhaul_wire::handshake::client::{self, ClientHandshake as Client};
use blockhaul_wire::handshake::negotiation::{Negotiation, NegotiationOptions};
use blockhaul_wire::handshake::server::{
    self, HandshakeConfig, ServerHandshake as Server, TlsRequirement,
};
use blockhaul_wire::option::{InfoRequest, OptionHeader, OptionReplyHeader, ReplyCode};
use blockhaul_wire::{ExportFlags, InfoSet, OptionCode, OptionError, ProtocolError, magic};

use super::{FLAGS, Talk, answer, option, refused, reply};

/// A client that has greeted a server with these handshake flags, and what it has sent.
fn greeted(flags: u16) -> (Client, Vec<u8>) {
    let mut client = Client::new();
    let mut out = Vec::new();
    let greeting = [&b"NBDMAGICIHAVEOPT"[..], &flags.to_be_bytes()].concat();
    let (used, event) = client.receive(&greeting, &mut out).unwrap();
    assert_eq!(
        (used, event),
        (18, client::ClientHandshakeEvent::Greeted(GreetingForm::FixedNewstyle))
    );
    (client, out)
}

/// The replies that a server sends to one option.
fn replies_to(talk: &mut Talk, code: OptionCode, payload: &[u8]) -> Vec<(ReplyCode, Vec<u8>)> {
    option(code, payload, &mut talk.up);
    loop {
        let (used, event) = talk.server.receive(&talk.up, &mut talk.down).unwrap();
        talk.up.drain(..used);
        match event {
            server::ServerHandshakeEvent::NeedMore { .. }
            | server::ServerHandshakeEvent::Transmission(_) => break,
            event => answer(&mut talk.server, event, &mut talk.down).unwrap(),
        }
    }
    let mut found = Vec::new();
    let mut bytes = std::mem::take(&mut talk.down);
    while !bytes.is_empty() {
        let head = OptionReplyHeader::parse(&bytes).unwrap().unwrap();
        let rest = bytes.split_off(OptionReplyHeader::LEN + head.length as usize);
        found.push((head.code, bytes.split_off(OptionReplyHeader::LEN)));
        bytes = rest;
    }
    found
}

// nbd: handshake.oldstyle-flags
#[test]
fn oldstyle_has_no_handshake_flags() {
    let mut out = Vec::new();
    server::oldstyle(512, FLAGS, &mut out);
    assert_eq!(out.len(), 152);
    assert_eq!(out[24..26], [0, 0]);
    assert!(out[28..].iter().all(|byte| *byte == 0));
}

// nbd: handshake.fixed-flag, handshake.no-other-server-flags
#[test]
fn a_server_offers_fixed_newstyle_and_no_zeroes_only() {
    let mut out = Vec::new();
    Server::new(HandshakeConfig::default(), &mut out);
    assert_eq!(out, [&b"NBDMAGICIHAVEOPT"[..], &[0, 3]].concat());
    out.clear();
    Server::new(HandshakeConfig { no_zeroes: false, ..HandshakeConfig::default() }, &mut out);
    assert_eq!(out[16..], [0, 1]);
}

// nbd: handshake.unknown-server-flags, handshake.client-no-zeroes
// nbd: handshake.no-other-client-flags
#[test]
fn unknown_handshake_flags_are_ignored() {
    assert_eq!(greeted(0xffff).1, 3_u32.to_be_bytes());
    // NO_ZEROES is not set if the server lacks it.
    assert_eq!(greeted(0xfffd).1, 1_u32.to_be_bytes());
}

// nbd: handshake.one-option, go.no-more-options
#[test]
fn one_option_at_a_time() {
    let (mut client, mut out) = greeted(3);
    client.list(&mut out).unwrap();
    out.clear();
    let caller = |result: Result<(), ProtocolError>| {
        assert!(matches!(result, Err(ProtocolError::Caller { .. })), "{result:?}");
    };
    caller(client.list(&mut out));
    caller(client.export_name("a", &mut out));
    // One of its replies is not the last.
    let entry = reply(OptionCode::List, ReplyCode::Server, b"\0\0\0\x01a");
    client.receive(&entry, &mut out).unwrap();
    caller(client.abort(&mut out));
    let end = reply(OptionCode::List, ReplyCode::Ack, &[]);
    client.receive(&end, &mut out).unwrap();
    assert!(out.is_empty());
    client.go("a", InfoSet::default(), &mut out).unwrap();
    let info = [&[0, 0][..], &9_u64.to_be_bytes(), &[0, 1]].concat();
    let info = reply(OptionCode::Go, ReplyCode::Info, &info);
    let end = reply(OptionCode::Go, ReplyCode::Ack, &[]);
    let (_, event) = client.receive(&[info, end].concat(), &mut out).unwrap();
    assert!(matches!(event, client::ClientHandshakeEvent::Transmission(_)));
    caller(client.abort(&mut out));
    caller(client.list(&mut out));
}

// nbd: list.no-data, starttls.no-data, structured.no-data, extended.no-data
#[test]
fn options_without_data_have_none() {
    type Send = fn(&mut Client, &mut Vec<u8>) -> Result<(), ProtocolError>;
    let options: [(OptionCode, Send); 5] = [
        (OptionCode::List, Client::list),
        (OptionCode::StartTls, Client::starttls),
        (OptionCode::StructuredReply, Client::structured_replies),
        (OptionCode::ExtendedHeaders, Client::extended_headers),
        (OptionCode::Abort, Client::abort),
    ];
    for (code, send) in options {
        let (mut client, mut out) = greeted(3);
        out.clear();
        send(&mut client, &mut out).unwrap();
        assert_eq!(*out, *OptionHeader { code, length: 0 }.encode());
    }
}

// nbd: starttls.reply
#[test]
fn starttls_with_data_is_refused() {
    for tls in [TlsRequirement::Off, TlsRequirement::Offered, TlsRequirement::Required] {
        let mut talk = Talk::new(HandshakeConfig { tls, ..HandshakeConfig::default() });
        let replies = replies_to(&mut talk, OptionCode::StartTls, b"now");
        let codes: Vec<_> = replies.into_iter().map(|(code, _)| code).collect();
        assert_eq!(codes, [ReplyCode::Error(OptionError::Invalid)]);
        // The session goes on.
        let list = replies_to(&mut talk, OptionCode::List, &[]);
        assert!(!list.is_empty());
    }
}

// nbd: info.unknown-request
#[test]
fn unknown_items_are_ignored() {
    let mut talk = Talk::new(HandshakeConfig::default());
    let payload = [&1_u32.to_be_bytes()[..], b"a", &[0, 3, 0x99, 0x99, 0, 1, 0x12, 0x34]].concat();
    let replies = replies_to(&mut talk, OptionCode::Info, &payload);
    let kinds: Vec<_> = replies.iter().map(|(_, payload)| payload.get(..2)).collect();
    let sizes = Some(&magic_kind(3)[..]);
    assert_eq!(kinds, [Some(&magic_kind(0)[..]), Some(&magic_kind(1)[..]), sizes, None]);
    assert_eq!(replies.last().unwrap().0, ReplyCode::Ack);
}

fn magic_kind(kind: u16) -> [u8; 2] {
    kind.to_be_bytes()
}

// nbd: info.same-as-go
#[test]
fn go_repeats_what_info_has_said() {
    for (extended, contexts) in [(false, false), (false, true), (true, false), (true, true)] {
        for wants in [InfoSet::default(), InfoSet::BLOCK_SIZE, InfoSet::ALL] {
            let mut talk = Talk::new(HandshakeConfig::default());
            if extended {
                talk.ask(|c, out| c.extended_headers(out))
            } else {
                talk.ask(|c, out| c.structured_replies(out))
            };
            if contexts {
                let queries = ["base:allocation".to_owned()];
                talk.ask(|c, out| c.set_meta_contexts("a", &queries, out));
            }
            let mut payload = Vec::new();
            InfoRequest { name: "a".to_owned(), wants }.emit(&mut payload);
            let said = replies_to(&mut talk, OptionCode::Info, &payload);
            let done = replies_to(&mut talk, OptionCode::Go, &payload);
            assert_eq!(said, done);
            let flags = ExportFlags::from_bits(u16::from_be_bytes([said[0].1[10], said[0].1[11]]));
            let filters = flags.contains(ExportFlags::BLOCK_STATUS_PAYLOAD);
            assert_eq!(filters, extended && contexts);
        }
    }
}

/// The contexts that a client gets from these replies to LIST_META_CONTEXT, as names.
fn listed(replies: &[u8]) -> Result<client::ClientHandshakeEvent, ProtocolError> {
    let (mut client, mut out) = greeted(3);
    client.list_meta_contexts("a", &[], &mut out).unwrap();
    client.receive(replies, &mut out).map(|(_, event)| event)
}

fn context(id: u32, name: &str) -> Vec<u8> {
    let payload = [&id.to_be_bytes()[..], name.as_bytes()].concat();
    reply(OptionCode::ListMetaContext, ReplyCode::MetaContext, &payload)
}

// nbd: meta.list-id
#[test]
fn numbers_of_listed_contexts_are_ignored() {
    let end = reply(OptionCode::ListMetaContext, ReplyCode::Ack, &[]);
    let replies = [context(7, "base:allocation"), context(7, "x-a:b"), end].concat();
    let client::ClientHandshakeEvent::Contexts(contexts) = listed(&replies).unwrap() else {
        panic!("no contexts");
    };
    let names: Vec<_> = contexts.iter().map(|context| context.name.as_str()).collect();
    assert_eq!(names, ["base:allocation", "x-a:b"]);
}

// nbd: meta.error-discards
#[test]
fn contexts_before_an_error_are_discarded() {
    let error = ReplyCode::Error(OptionError::TooBig);
    let end = reply(OptionCode::ListMetaContext, error, b"enough");
    let event = listed(&[context(1, "base:allocation"), end].concat()).unwrap();
    assert_eq!(refused(event), OptionError::TooBig);

    let mut talk = Talk::new(HandshakeConfig::default());
    talk.ask(|c, out| c.structured_replies(out));
    let queries = ["base:allocation".to_owned()];
    talk.client.set_meta_contexts("a", &queries, &mut talk.up).unwrap();
    let selected = [&5_u32.to_be_bytes()[..], b"base:allocation"].concat();
    let selected = reply(OptionCode::SetMetaContext, ReplyCode::MetaContext, &selected);
    let end = reply(OptionCode::SetMetaContext, error, &[]);
    let (_, event) = talk.client.receive(&[selected, end].concat(), &mut Vec::new()).unwrap();
    assert_eq!(refused(event), OptionError::TooBig);
    talk.up.clear();
    let event = talk.ask(|c, out| c.go("a", InfoSet::default(), out));
    let client::ClientHandshakeEvent::Transmission(negotiated) = event else { panic!("{event:?}") };
    assert!(negotiated.contexts.is_empty());
}

// nbd: info.no-order
#[test]
fn information_comes_in_any_order() {
    let sizes = [512_u32, 4096, 65_536].map(u32::to_be_bytes).concat();
    let items = [
        [&magic_kind(0)[..], &9_u64.to_be_bytes(), &[0, 1]].concat(),
        [&magic_kind(1)[..], b"name"].concat(),
        [&magic_kind(3)[..], &sizes].concat(),
    ];
    let mut found = Vec::new();
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2]] {
        let (mut client, mut out) = greeted(3);
        client.go("a", InfoSet::ALL, &mut out).unwrap();
        let mut bytes = Vec::new();
        for item in order {
            bytes.extend(reply(OptionCode::Go, ReplyCode::Info, &items[item]));
        }
        bytes.extend(reply(OptionCode::Go, ReplyCode::Ack, &[]));
        let (_, event) = client.receive(&bytes, &mut out).unwrap();
        let client::ClientHandshakeEvent::Transmission(negotiated) = event else {
            panic!("{event:?}")
        };
        found.push(negotiated.info);
    }
    assert_eq!(found[0].size, 9);
    assert_eq!(found[0].block_sizes.unwrap().maximum, 65_536);
    assert!(found.iter().all(|info| *info == found[0]));
}

// nbd: meta.query-form
#[test]
fn queries_have_a_namespace() {
    let (mut client, mut out) = greeted(3);
    client.structured_replies(&mut out).unwrap();
    let end = reply(OptionCode::StructuredReply, ReplyCode::Ack, &[]);
    client.receive(&end, &mut out).unwrap();
    out.clear();
    for bad in ["allocation", ":allocation", ":", ""] {
        let queries = [bad.to_owned()];
        let error = client.list_meta_contexts("a", &queries, &mut out).unwrap_err();
        assert!(error.to_string().contains("no namespace"), "{error}");
        client.set_meta_contexts("a", &queries, &mut out).unwrap_err();
        let wants =
            NegotiationOptions { contexts: queries.to_vec(), ..NegotiationOptions::new("a") };
        Negotiation::new(wants).unwrap_err();
    }
    assert!(out.is_empty());
    client.list_meta_contexts("a", &["base:".to_owned()], &mut out).unwrap();
    assert_eq!(out[8..12], magic::OPT_LIST_META_CONTEXT.to_be_bytes());
}
