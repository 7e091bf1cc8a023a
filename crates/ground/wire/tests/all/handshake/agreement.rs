//! Whatever is offered and requested, and however the bytes arrive, both sides agree.

use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq};
use proptest::proptest;

use blockhaul_wire::handshake::GreetingForm;
use blockhaul_wire::handshake::client;
use blockhaul_wire::handshake::negotiation::{
    Negotiation, NegotiationGoal, NegotiationOptions, NegotiationStep,
};
use blockhaul_wire::handshake::server::{
    self, HandshakeConfig, ServerHandshake as Server, TlsRequirement,
};
use blockhaul_wire::{BlockSizeInfo, ExportFlags, InfoSet, ProtocolError, ReplyForm, RequestForm};

use super::{FLAGS, answer};

/// Bytes in transit, cut by a random sequence.
struct Pipe {
    bytes: Vec<u8>,
    arrived: usize,
}

impl Pipe {
    fn new() -> Pipe {
        Pipe { bytes: Vec::new(), arrived: 0 }
    }

    /// The received bytes after some more have arrived.
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

/// Runs a negotiation against a server; returns both results.
pub(crate) fn negotiate(
    config: HandshakeConfig,
    wants: NegotiationOptions,
    cuts: &[u8],
) -> (Result<client::ClientHandshakeResult, ProtocolError>, Option<server::ServerHandshakeResult>) {
    let mut cuts = cuts.iter().copied().cycle();
    let mut up = Pipe::new();
    let mut down = Pipe::new();
    let mut server = Server::new(config, &mut down.bytes);
    let mut client = Negotiation::new(wants).unwrap();
    let mut theirs = None;
    let mut ours = None;
    for _ in 0..10_000 {
        if ours.is_none() {
            match client.receive(down.more(&mut cuts), &mut up.bytes) {
                Ok((used, step)) => {
                    down.consume(used);
                    match step {
                        NegotiationStep::NeedMore { .. } => {}
                        NegotiationStep::Transmission(negotiated) => ours = Some(Ok(*negotiated)),
                        NegotiationStep::StartTls => client.tls_started().unwrap(),
                        NegotiationStep::Options => panic!("{step:?}"),
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
                        server::ServerHandshakeEvent::NeedMore { .. } => {}
                        server::ServerHandshakeEvent::Transmission(negotiated) => {
                            theirs = Some(Some(*negotiated))
                        }
                        server::ServerHandshakeEvent::Abort => theirs = Some(None),
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
            // The server closed: all bytes in transit have arrived.
            (None, Some(None)) if down.bytes.is_empty() => {
                return (Err(client.closed(&[]).unwrap_err()), None);
            }
            // The client closed without sending anything.
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

    // nbd: tls.client-any-mode, sizes.go, starttls.first, go.no-zeroes, structured.after-tls
    // nbd: baseline.modes, extended.go, extended.after-tls
    /// Whatever is offered and requested, and however the bytes arrive, both sides agree.
    #[test]
    fn both_sides_agree(
        (fixed_newstyle, no_zeroes, structured, extended, meta_contexts) in any::<(bool, bool, bool, bool, bool)>(),
        (want_extended, want_structured, want_contexts, default_export) in any::<(bool, bool, bool, bool)>(),
        (name, description, block_size, known) in any::<(bool, bool, bool, bool)>(),
        tls in proptest::sample::select(vec![
            (TlsRequirement::Off, false), (TlsRequirement::Offered, false), (TlsRequirement::Offered, true), (TlsRequirement::Required, true),
        ]),
        cuts in proptest::collection::vec(any::<u8>(), 1..20),
    ) {
        let (tls, want_tls) = tls;
        let config = HandshakeConfig {
            fixed_newstyle, no_zeroes, structured, extended, meta_contexts, tls, ..HandshakeConfig::default()
        };
        let infos = InfoSet { name, description, block_size };
        let selected = ["x-test:one", "base:allocation", "nobody:knows"].map(str::to_owned);
        let wants = NegotiationOptions {
            export: if !known { "nope" } else if default_export { "" } else { "a" }.to_owned(),
            contexts: if want_contexts { selected.to_vec() } else { Vec::new() },
            tls: want_tls,
            extended: want_extended,
            structured: want_structured,
            infos,
            end: NegotiationGoal::Transmission,
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

        // The result is the expected one.
        let replies = match fixed_newstyle {
            true if extended && want_extended => ReplyForm::Extended,
            true if structured && want_structured => ReplyForm::Structured,
            _ => ReplyForm::Simple,
        };
        let extended = replies == ReplyForm::Extended;
        prop_assert_eq!(ours.replies, replies);
        prop_assert_eq!(ours.headers, if extended { RequestForm::Extended } else { RequestForm::Compact });
        let with_contexts = replies != ReplyForm::Simple && meta_contexts && want_contexts;
        let ids: Vec<u32> = ours.contexts.iter().map(|context| context.id).collect();
        prop_assert_eq!(ids, if with_contexts { vec![17, 4] } else { vec![] });
        let flags = FLAGS
            .with(ExportFlags::SEND_DF, replies != ReplyForm::Simple)
            .with(ExportFlags::BLOCK_STATUS_PAYLOAD, extended && with_contexts);
        prop_assert_eq!(ours.info.flags, flags);
        prop_assert_eq!(ours.info.size, 1 << 40);
        let sizes = BlockSizeInfo { minimum: 512, ..BlockSizeInfo::DEFAULT };
        if fixed_newstyle {
            prop_assert_eq!(ours.protocol, GreetingForm::FixedNewstyle);
            prop_assert_eq!(ours.info.block_sizes, Some(sizes));
            prop_assert_eq!(theirs.obeys_block_sizes, block_size);
            prop_assert_eq!(ours.info.name, name.then(|| "a".to_owned()));
            prop_assert_eq!(ours.info.description, description.then(|| "the first".to_owned()));
        } else {
            prop_assert_eq!(ours.protocol, GreetingForm::Newstyle);
            prop_assert!(!theirs.obeys_block_sizes);
            prop_assert_eq!(ours.info.block_sizes, None);
        }
    }
}
