//! A connection that stays in the handshake: lists exports, queries facts and contexts.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::handshake::GreetingForm;
use blockhaul_wire::handshake::client::{
    ClientHandshake, ClientHandshakeEvent, ClientHandshakeResult, ExportInfo,
};
use blockhaul_wire::{InfoSet, ListEntry, MetaContext, OptionError, ReplyForm};

use crate::backends::{UriParts, parse};
use crate::connect::{
    ConnectOptions, HandshakeEnd, ServerAddress, WaitReason, at, connect_for_options,
};
use crate::link::{HandshakeLink, refused};

/// Where to connect: an address, the export, and the name for messages.
#[derive(Clone)]
pub struct ConnectTarget {
    /// What the user typed.
    pub name: String,
    /// Where the server listens.
    pub address: ServerAddress,
    /// The export's name.
    pub export: String,
    /// The TLS settings, if it is required.
    pub tls: Option<Arc<blockhaul_tls::TlsConnector>>,
}

impl ConnectTarget {
    /// Parses a URI.
    pub fn parse(uri: &str) -> Result<ConnectTarget> {
        let UriParts { address, export, tls } = parse(uri)?;
        Ok(ConnectTarget { name: uri.to_string(), address, export, tls })
    }
}

/// A connection in the option phase.
pub struct OptionSession {
    place: ConnectTarget,
    link: HandshakeLink,
    options: ConnectOptions,
    state: OptionState,
}

enum OptionState {
    Asking(Box<ClientHandshake>),
    /// An oldstyle server: it has one export, and has already described it.
    Told(Box<ClientHandshakeResult>),
}

impl OptionSession {
    /// Connects and negotiates headers and replies.
    pub async fn connect(place: ConnectTarget, options: &ConnectOptions) -> Result<OptionSession> {
        let options = ConnectOptions { tls: place.tls.clone(), ..options.clone() };
        let (link, ended) = connect_for_options(&place.address, &options)
            .await
            .map_err(|error| at(&place.name, &place.address, error))?;
        let state = match ended {
            HandshakeEnd::Options(handshake) => OptionState::Asking(handshake),
            HandshakeEnd::Transmission(negotiated) => OptionState::Told(negotiated),
        };
        Ok(OptionSession { place, link, options, state })
    }

    /// The protocol of the server's greeting.
    pub fn protocol(&self) -> Option<GreetingForm> {
        match &self.state {
            OptionState::Asking(handshake) => handshake.protocol(),
            OptionState::Told(negotiated) => Some(negotiated.protocol),
        }
    }

    /// The form of replies that was negotiated.
    pub fn replies(&self) -> ReplyForm {
        match &self.state {
            OptionState::Asking(handshake) => handshake.replies(),
            OptionState::Told(negotiated) => negotiated.replies,
        }
    }

    /// Whether TLS is in use.
    pub fn tls(&self) -> bool {
        self.options.tls.is_some()
    }

    /// The exports that the server lists.
    pub async fn list(&mut self) -> Result<Vec<ListEntry>> {
        let event = self.ask("list exports", |handshake, out| handshake.list(out)).await?;
        match event {
            ClientHandshakeEvent::Listed(entries) => Ok(entries),
            other => Err(self.unexpected(other)),
        }
    }

    /// Facts of an export.
    pub async fn info(&mut self, export: &str) -> Result<ExportInfo> {
        if let OptionState::Told(negotiated) = &self.state {
            return Ok(negotiated.info.clone());
        }
        let wants = InfoSet { name: true, description: true, block_size: true };
        let asked =
            self.ask("ask about an export", |handshake, out| handshake.info(export, wants, out));
        match asked.await? {
            ClientHandshakeEvent::Info(info) => Ok(*info),
            other => Err(self.unexpected(other)),
        }
    }

    /// Names of the contexts of an export; none if the server does not support contexts.
    pub async fn contexts(&mut self, export: &str) -> Result<Vec<MetaContext>> {
        // Even with simple replies: some servers list contexts that cannot be used then.
        if matches!(self.state, OptionState::Told(_)) {
            return Ok(Vec::new());
        }
        let asked = self.ask("list contexts", |handshake, out| {
            handshake.list_meta_contexts(export, &[] as &[String], out)
        });
        match asked.await? {
            ClientHandshakeEvent::Contexts(contexts) => Ok(contexts),
            ClientHandshakeEvent::Refused { .. } => Ok(Vec::new()),
            other => Err(self.unexpected(other)),
        }
    }

    /// The contexts of an export that match queries: those that the server lists, or that it selects. Without
    /// queries it lists all, and selects none.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] for an oldstyle server; what the server refuses; a query that is no name.
    pub async fn matching_contexts(
        &mut self,
        export: &str,
        queries: &[String],
        select: bool,
    ) -> Result<Vec<MetaContext>> {
        let what = if select { "select contexts" } else { "list contexts" };
        let asked = self.ask(what, |handshake, out| {
            if select {
                handshake.set_meta_contexts(export, queries, out)
            } else {
                handshake.list_meta_contexts(export, queries, out)
            }
        });
        match asked.await? {
            ClientHandshakeEvent::Contexts(contexts) => Ok(contexts),
            other => Err(self.unexpected(other)),
        }
    }

    // nbd: abort.then-close
    /// Ends the session.
    pub async fn abort(mut self) {
        if matches!(self.state, OptionState::Asking(_)) {
            // The replies do not matter: a server may close at once.
            let _ = self.ask("end the session", |handshake, out| handshake.abort(out)).await;
        }
        self.link.queue.close(&self.link.stream);
    }

    async fn ask(
        &mut self,
        what: &str,
        say: impl FnOnce(
            &mut ClientHandshake,
            &mut Vec<u8>,
        ) -> Result<(), blockhaul_wire::ProtocolError>,
    ) -> Result<ClientHandshakeEvent> {
        let OptionState::Asking(handshake) = &mut self.state else {
            let text = format!("cannot {what}: the server speaks the old protocol without options");
            return Err(Error::new(Kind::Unsupported, text).on(&self.place.name.as_str().into()));
        };
        let mut out = Vec::new();
        let link = &mut self.link;
        let talk = async {
            say(handshake, &mut out).map_err(|error| refused(&error))?;
            loop {
                link.say(&mut out).await?;
                let (used, event) = handshake
                    .receive(link.window.bytes(), &mut out)
                    .map_err(|error| refused(&error))?;
                link.consume(used);
                let ClientHandshakeEvent::NeedMore { bytes } = event else { return Ok(event) };
                if bytes > link.window.capacity() {
                    link.window.grow(bytes);
                }
                let more = link.window.fill(&link.stream).await;
                if !more.map_err(|error| Error::system("receive", error))? {
                    let text = format!("cannot {what}: the server closed the connection");
                    return Err(Error::new(Kind::Disconnected, text));
                }
            }
        };
        let event = WaitReason::new("answer").within(self.options.connect_timeout, talk).await;
        if let Ok(ClientHandshakeEvent::Refused { reason: OptionError::Shutdown, .. }) = &event {
            self.leave().await;
        }
        let event = event.map_err(|error| match error.kind() {
            Kind::TimedOut => error.reworded(format!("cannot {what}: {}", error.text())),
            _ => error,
        });
        event.map_err(|error| at(&self.place.name, &self.place.address, error))
    }

    // nbd: abort.shutdown
    /// Ends the session with a server that is shutting down.
    async fn leave(&mut self) {
        let OptionState::Asking(handshake) = &mut self.state else { return };
        let mut out = Vec::new();
        if handshake.abort(&mut out).is_ok() {
            // The server may have closed already.
            let _ = self.link.say(&mut out).await;
        }
    }

    fn unexpected(&self, event: ClientHandshakeEvent) -> Error {
        let error = match event {
            ClientHandshakeEvent::Refused { option, reason, text } => {
                let what = option.to_string();
                refused(&blockhaul_wire::ProtocolError::Refused { option, what, reason, text })
            }
            _ => Error::new(Kind::Io, "the server's reply does not match the option"),
        };
        at(&self.place.name, &self.place.address, error)
    }
}
