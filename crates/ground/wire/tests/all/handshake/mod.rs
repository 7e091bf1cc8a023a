//! The two sides of the handshake against each other, and against peers that violate the rules.

// Test helpers may panic like tests.

mod agreement;
mod negotiation;
mod options;
mod rules;
mod wrong_clients;
mod wrong_servers;

use blockhaul_wire::handshake::GreetingForm;
use blockhaul_wire::handshake::client::{self, ClientHandshake as Client};
use blockhaul_wire::handshake::server::{
    self, ExportReply, HandshakeConfig, OptionRefusal, ServerHandshake as Server,
};
use blockhaul_wire::option::{OptionHeader, OptionReplyHeader, ReplyCode};
use blockhaul_wire::{
    BlockSizeInfo, ExportFlags, ListEntry, MetaContext, OptionCode, OptionError, ProtocolError,
};

const FLAGS: ExportFlags = ExportFlags::from_bits(0xded);

/// A server with the exports "a" (with all information) and "b" (only a size); "" is "a".
fn export(name: &str) -> Result<ExportReply, OptionRefusal> {
    match name {
        "" | "a" => Ok(ExportReply {
            size: 1 << 40,
            flags: FLAGS,
            block_sizes: Some(BlockSizeInfo { minimum: 512, ..BlockSizeInfo::DEFAULT }),
            require_block_sizes: false,
            name: Some("a".to_owned()),
            description: Some("the first".to_owned()),
        }),
        "b" => Ok(ExportReply { size: 5, ..ExportReply::default() }),
        _ => Err(OptionRefusal::new(OptionError::Unknown, format!("no export {name:?} here\x1b"))),
    }
}

fn contexts(queries: &[String], set: bool) -> Vec<MetaContext> {
    let known = ["base:allocation", "x-test:one"].iter().zip([17, 4]);
    let wanted = |name: &str| queries.iter().any(|query| query == name);
    let list_all = !set && queries.is_empty();
    known
        .filter(|(name, _)| list_all || wanted(name))
        .map(|(name, id)| MetaContext { id, name: (*name).to_owned() })
        .collect()
}

/// Answers an event like that server.
fn answer(
    server: &mut Server,
    event: server::ServerHandshakeEvent,
    out: &mut Vec<u8>,
) -> Result<(), ProtocolError> {
    match event {
        server::ServerHandshakeEvent::Export { name, .. } => {
            server.answer_export(export(&name), out)
        }
        server::ServerHandshakeEvent::List => {
            let entry = |name: &str, text: &str| ListEntry {
                name: name.to_owned(),
                description: text.to_owned(),
            };
            server.answer_list(Ok(&[entry("a", "the first"), entry("b", "")]), out)
        }
        server::ServerHandshakeEvent::MetaContext { queries, set, .. } => {
            server.answer_contexts(Ok(contexts(&queries, set)), out)
        }
        server::ServerHandshakeEvent::StartTls => server.tls_started(),
        event => panic!("{event:?}"),
    }
}

/// A server and a client that communicate directly: sends what `client` has put in `up`, and
/// returns the client's result.
struct Talk {
    server: Server,
    client: Client,
    up: Vec<u8>,
    down: Vec<u8>,
    served: Option<server::ServerHandshakeResult>,
}

impl Talk {
    fn new(config: HandshakeConfig) -> Talk {
        let mut down = Vec::new();
        let server = Server::new(config, &mut down);
        let mut talk = Talk { server, client: Client::new(), up: Vec::new(), down, served: None };
        assert_eq!(
            talk.event(),
            client::ClientHandshakeEvent::Greeted(GreetingForm::FixedNewstyle)
        );
        talk
    }

    fn ask(
        &mut self,
        option: impl FnOnce(&mut Client, &mut Vec<u8>) -> Result<(), ProtocolError>,
    ) -> client::ClientHandshakeEvent {
        option(&mut self.client, &mut self.up).unwrap();
        self.event()
    }

    fn event(&mut self) -> client::ClientHandshakeEvent {
        loop {
            let (used, event) = self.server.receive(&self.up, &mut self.down).unwrap();
            self.up.drain(..used);
            match event {
                server::ServerHandshakeEvent::NeedMore { .. }
                | server::ServerHandshakeEvent::Abort => break,
                server::ServerHandshakeEvent::Transmission(negotiated) => {
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

fn refused(event: client::ClientHandshakeEvent) -> OptionError {
    match event {
        client::ClientHandshakeEvent::Refused { reason, .. } => reason,
        event => panic!("{event:?}"),
    }
}

fn names(event: client::ClientHandshakeEvent) -> Vec<String> {
    match event {
        client::ClientHandshakeEvent::Contexts(contexts) => {
            contexts.into_iter().map(|c| c.name).collect()
        }
        client::ClientHandshakeEvent::Listed(entries) => {
            entries.into_iter().map(|e| e.name).collect()
        }
        event => panic!("{event:?}"),
    }
}

fn option(code: OptionCode, payload: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&OptionHeader { code, length: payload.len() as u32 }.encode());
    out.extend_from_slice(payload);
}

fn reply(option: OptionCode, code: ReplyCode, payload: &[u8]) -> Vec<u8> {
    let length = payload.len() as u32;
    [&OptionReplyHeader { option, code, length }.encode()[..], payload].concat()
}
