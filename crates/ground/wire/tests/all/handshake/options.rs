//! Options in any order, and options that the callers of either side must not send.

use blockhaul_wire::handshake::client::{self, ClientHandshake as Client};
use blockhaul_wire::handshake::server::{
    self, HandshakeConfig, ServerHandshake as Server, TlsRequirement,
};
use blockhaul_wire::{
    ExportFlags, InfoSet, OptionCode, OptionError, ProtocolError, ReplyForm, RequestForm, limits,
};

use super::{Talk, export, names, option, refused};

// nbd: tls.starttls-refused, tls.no-reqd-without-tls, abort.ack, info.export, meta.list-replies
// nbd: meta.list-all, meta.set-refused, baseline.options
#[test]
fn options_in_any_order() {
    let mut talk = Talk::new(HandshakeConfig::default());
    assert_eq!(names(talk.ask(|c, out| c.list(out))), ["a", "b"]);
    // Contexts need structured replies.
    let event = talk.ask(|c, out| c.list_meta_contexts("a", &[], out));
    assert_eq!(refused(event), OptionError::Invalid);
    let event = talk.ask(|c, out| c.structured_replies(out));
    assert_eq!(event, client::ClientHandshakeEvent::Accepted(OptionCode::StructuredReply));
    let event = talk.ask(|c, out| c.list_meta_contexts("a", &[], out));
    assert_eq!(names(event), ["base:allocation", "x-test:one"]);
    let client::ClientHandshakeEvent::Info(info) =
        talk.ask(|c, out| c.info("b", InfoSet::ALL, out))
    else {
        panic!("no information");
    };
    assert_eq!((info.size, info.block_sizes), (5, None));
    assert_eq!((info.name.as_deref(), info.description), (Some("b"), None));
    assert_eq!(info.flags, ExportFlags::HAS_FLAGS);
    // Extended headers replace structured replies.
    let event = talk.ask(|c, out| c.extended_headers(out));
    assert_eq!(event, client::ClientHandshakeEvent::Accepted(OptionCode::ExtendedHeaders));
    let event = talk.ask(|c, out| c.info("a", InfoSet::default(), out));
    let client::ClientHandshakeEvent::Info(info) = event else { panic!("{event:?}") };
    // No context is selected.
    assert!(!info.flags.contains(ExportFlags::BLOCK_STATUS_PAYLOAD));
    let event = talk.ask(|c, out| c.starttls(out));
    assert_eq!(refused(event), OptionError::Unsupported);
    let event = talk.ask(|c, out| c.go("nope", InfoSet::default(), out));
    assert_eq!(refused(event), OptionError::Unknown);
    assert_eq!(talk.ask(|c, out| c.abort(out)), client::ClientHandshakeEvent::Aborted);
}

// nbd: meta.needs-selection, meta.set-replaces, meta.set-none, block-status.needs-selection
// nbd: extended.payload-flag, extended.payload-flag-go
#[test]
fn contexts_are_replaced_and_belong_to_their_export() {
    let query = |name: &str| vec![name.to_owned()];
    let select = |talk: &mut Talk, export: &str, queries: Vec<String>| {
        names(talk.ask(|c, out| c.set_meta_contexts(export, &queries, out)))
    };
    let go = |mut talk: Talk, export: &str| {
        let event = talk.ask(|c, out| c.go(export, InfoSet::default(), out));
        let client::ClientHandshakeEvent::Transmission(negotiated) = event else {
            panic!("{event:?}")
        };
        let served = talk.served.unwrap();
        assert_eq!(served.contexts, negotiated.contexts);
        assert_eq!(served.flags, negotiated.info.flags);
        let flag = served.flags.contains(ExportFlags::BLOCK_STATUS_PAYLOAD);
        assert_eq!(flag, !served.contexts.is_empty());
        negotiated.contexts.into_iter().map(|c| c.name).collect::<Vec<_>>()
    };
    let talk = || {
        let mut talk = Talk::new(HandshakeConfig::default());
        talk.ask(|c, out| c.extended_headers(out));
        talk
    };

    // The last selection counts.
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
    // Repeated selections use options, but no memory.
    let mut many = talk();
    for _ in 0..limits::OPTIONS - 2 {
        select(&mut many, "a", query("base:allocation"));
    }
    assert_eq!(go(many, "a"), ["base:allocation"]);
}

// nbd: tls.starttls-accepted, tls.reqd-info-only, starttls.forgets, structured.after-tls
// nbd: extended.starttls-forgets, extended.after-tls
#[test]
fn tls_forgets_what_was_negotiated() {
    let mut talk =
        Talk::new(HandshakeConfig { tls: TlsRequirement::Offered, ..HandshakeConfig::default() });
    talk.ask(|c, out| c.extended_headers(out));
    let queries = ["base:allocation".to_owned()];
    talk.ask(|c, out| c.set_meta_contexts("a", &queries, out));
    assert_eq!(talk.ask(|c, out| c.starttls(out)), client::ClientHandshakeEvent::StartTls);
    talk.client.tls_started().unwrap();
    assert_eq!(talk.client.headers(), RequestForm::Compact);
    let client::ClientHandshakeEvent::Transmission(negotiated) =
        talk.ask(|c, out| c.go("a", InfoSet::default(), out))
    else {
        panic!("no transmission");
    };
    assert!(negotiated.tls && negotiated.contexts.is_empty());
    assert_eq!(negotiated.replies, ReplyForm::Simple);
    let served = talk.served.unwrap();
    assert!(served.tls && served.contexts.is_empty() && served.replies == ReplyForm::Simple);
}

// nbd: abort.server-errors-options, abort.server-shutdown
#[test]
fn a_stopping_server_refuses_politely() {
    let mut talk = Talk::new(HandshakeConfig::default());
    talk.server.stop();
    assert_eq!(refused(talk.ask(|c, out| c.list(out))), OptionError::Shutdown);
    let event = talk.ask(|c, out| c.go("a", InfoSet::default(), out));
    assert_eq!(refused(event), OptionError::Shutdown);
    assert_eq!(talk.ask(|c, out| c.abort(out)), client::ClientHandshakeEvent::Aborted);
}

// nbd: string.form, meta.structured, structured.extensions, meta.set-needs-structured
// nbd: extended.no-export-name
#[test]
fn the_callers_mistakes_are_told() {
    let mut out = Vec::new();
    let mut server = Server::new(HandshakeConfig::default(), &mut out);
    let caller = |result: Result<(), ProtocolError>| {
        assert!(matches!(result, Err(ProtocolError::Caller { .. })), "{result:?}");
    };
    caller(server.answer_list(Ok(&[]), &mut out));
    caller(server.answer_export(export("a"), &mut out));
    caller(server.answer_contexts(Ok(vec![]), &mut out));
    caller(server.tls_started());
    let mut input = 3u32.to_be_bytes().to_vec();
    option(OptionCode::List, &[], &mut input);
    let mut server = Server::new(HandshakeConfig::default(), &mut out);
    assert_eq!(server.receive(&input, &mut out), Ok((20, server::ServerHandshakeEvent::List)));
    caller(server.receive(&[], &mut out).map(|_| ()));

    let mut client = Client::new();
    caller(client.list(&mut out));
    caller(client.export_name("a", &mut out));
    caller(client.tls_started());
    let long = "x".repeat(4097);
    let mut talk = Talk::new(HandshakeConfig::default());
    assert!(talk.client.go(&long, InfoSet::ALL, &mut out).is_err());
    assert!(talk.client.go("a\0", InfoSet::ALL, &mut out).is_err());
    caller(talk.client.set_meta_contexts("a", &[], &mut out));
    talk.ask(|c, out| c.extended_headers(out));
    caller(talk.client.export_name("a", &mut out));
    caller(talk.client.structured_replies(&mut out));
    let many = vec![String::new(); limits::QUERIES + 1];
    assert!(talk.client.set_meta_contexts("a", &many, &mut out).is_err());
}
