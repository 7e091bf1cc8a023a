//! The usual sequence of options: with old servers, with required TLS, up to the choice of an
//! export.

use blockhaul_wire::handshake::GreetingForm;
use blockhaul_wire::handshake::negotiation::{
    Negotiation, NegotiationGoal, NegotiationOptions, NegotiationStep,
};
use blockhaul_wire::handshake::server::{self, HandshakeConfig, ServerHandshake as Server};
use blockhaul_wire::option::ReplyCode;
use blockhaul_wire::{ExportFlags, OptionCode, OptionError, ReplyForm, RequestForm};

use super::{FLAGS, answer, names, option, reply};

#[test]
fn old_servers_are_spoken_to() {
    // A fixed newstyle server that supports only EXPORT_NAME.
    let refuse = |option| reply(option, ReplyCode::Error(OptionError::Unsupported), &[]);
    let mut bytes = [&b"NBDMAGICIHAVEOPT"[..], &[0, 1]].concat();
    for option in [OptionCode::ExtendedHeaders, OptionCode::StructuredReply, OptionCode::Go] {
        bytes.extend(refuse(option));
    }
    bytes.extend_from_slice(&77u64.to_be_bytes());
    bytes.extend_from_slice(&[0, 1]);
    bytes.extend_from_slice(&[0; 124]);
    let mut out = Vec::new();
    let mut negotiation = Negotiation::new(NegotiationOptions::new("disk")).unwrap();
    let (used, step) = negotiation.receive(&bytes, &mut out).unwrap();
    assert_eq!(used, bytes.len());
    let NegotiationStep::Transmission(negotiated) = step else { panic!("{step:?}") };
    assert_eq!((negotiated.info.size, negotiated.replies), (77, ReplyForm::Simple));
    assert!(out.ends_with(b"IHAVEOPT\0\0\0\x01\0\0\0\x04disk"));
    // The zeroes were not declined, as the server did not offer that.
    assert_eq!(out[..4], [0, 0, 0, 1]);

    // An oldstyle server.
    let mut bytes = Vec::new();
    server::oldstyle(88, FLAGS, &mut bytes);
    assert_eq!(bytes.len(), 152);
    let mut negotiation = Negotiation::new(NegotiationOptions::new("ignored")).unwrap();
    let (used, step) = negotiation.receive(&bytes, &mut out).unwrap();
    let NegotiationStep::Transmission(negotiated) = step else { panic!("{step:?}") };
    assert_eq!((used, negotiated.info.size), (152, 88));
    assert_eq!(negotiated.protocol, GreetingForm::Oldstyle);
    assert_eq!(negotiated.info.flags, FLAGS.without(ExportFlags::SEND_DF));
}

// nbd: tls.client-any-mode, tls.client-fixed-newstyle, tls.client-refused, tls.client-first
#[test]
fn a_demand_for_tls_is_never_given_up() {
    let mut oldstyle = Vec::new();
    server::oldstyle(88, FLAGS, &mut oldstyle);
    let greeting = |flags: &[u8]| [&b"NBDMAGICIHAVEOPT"[..], flags].concat();
    let newstyle = greeting(&[0, 0]);
    for (bytes, said) in [(oldstyle, 0), (newstyle, 4)] {
        for end in [NegotiationGoal::Options, NegotiationGoal::Transmission] {
            let wants = NegotiationOptions { tls: true, end, ..NegotiationOptions::new("a") };
            let mut out = Vec::new();
            let mut negotiation = Negotiation::new(wants).unwrap();
            let error = negotiation.receive(&bytes, &mut out).unwrap_err();
            assert!(error.to_string().contains("TLS is demanded"), "{error}");
            assert_eq!(out.len(), said);
        }
    }
    // Refused: the session is ended properly, and no other option is sent.
    let errors = [OptionError::Unsupported, OptionError::Policy, OptionError::Invalid];
    for refusal in errors {
        let refused = reply(OptionCode::StartTls, ReplyCode::Error(refusal), &[]);
        let bytes = [greeting(&[0, 3]), refused].concat();
        let mut out = Vec::new();
        let mut negotiation =
            Negotiation::new(NegotiationOptions { tls: true, ..NegotiationOptions::new("a") })
                .unwrap();
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
    let mut server = Server::new(HandshakeConfig::default(), &mut down);
    let wants =
        NegotiationOptions { end: NegotiationGoal::Options, ..NegotiationOptions::new("a") };
    let mut negotiation = Negotiation::new(wants).unwrap();
    let mut up = Vec::new();
    loop {
        let (used, step) = negotiation.receive(&down, &mut up).unwrap();
        down.drain(..used);
        if step == NegotiationStep::Options {
            break;
        }
        let (used, _) = server.receive(&up, &mut down).unwrap();
        up.drain(..used);
    }
    let mut client = negotiation.into_handshake();
    assert_eq!(client.headers(), RequestForm::Extended);
    assert_eq!(client.protocol(), Some(GreetingForm::FixedNewstyle));
    client.list(&mut up).unwrap();
    let (_, event) = server.receive(&up, &mut down).unwrap();
    answer(&mut server, event, &mut down).unwrap();
    let (_, event) = client.receive(&down, &mut up).unwrap();
    assert_eq!(names(event), ["a", "b"]);
}

/// The contexts that a client selects for these wishes, of a server that takes options as said.
fn selected(wishes: &[&str], extended: bool) -> Vec<u8> {
    let reply = |option, taken| {
        let code = if taken { ReplyCode::Ack } else { ReplyCode::Error(OptionError::Unsupported) };
        reply(option, code, &[])
    };
    let mut bytes = [&b"NBDMAGICIHAVEOPT"[..], &[0, 1]].concat();
    bytes.extend(reply(OptionCode::ExtendedHeaders, extended));
    if !extended {
        bytes.extend(reply(OptionCode::StructuredReply, true));
    }
    let contexts = wishes.iter().map(ToString::to_string).collect();
    let mut negotiation =
        Negotiation::new(NegotiationOptions { contexts, ..NegotiationOptions::new("a") }).unwrap();
    let mut out = Vec::new();
    negotiation.receive(&bytes, &mut out).unwrap();
    let start = out.windows(12).rposition(|part| part == b"IHAVEOPT\0\0\0\x0a").unwrap();
    out.split_off(start)
}

#[test]
fn a_context_of_qemu_shares_no_reply_with_another() {
    let asked = |contexts: &[&str]| {
        let mut payload = [&1u32.to_be_bytes()[..], b"a"].concat();
        payload.extend((contexts.len() as u32).to_be_bytes());
        for context in contexts {
            payload.extend((context.len() as u32).to_be_bytes());
            payload.extend(context.as_bytes());
        }
        let mut out = Vec::new();
        option(OptionCode::SetMetaContext, &payload, &mut out);
        out
    };
    let qemu = ["base:allocation", "qemu:dirty-bitmap:b0"];
    assert_eq!(selected(&qemu, false), asked(&qemu[1..]));
    // Here each request names its context.
    assert_eq!(selected(&qemu, true), asked(&qemu));
    let other = ["base:allocation", "x-test:b0"];
    assert_eq!(selected(&other, false), asked(&other));
}
