//! A connection that stays in the handshake: lists exports, queries facts and contexts.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_wire::handshake::Protocol;
use blockhaul_wire::handshake::client::{Event, ExportInfo, Handshake, Negotiated};
use blockhaul_wire::{Context, Infos, ListEntry, OptionError, Replies};

use crate::backends::{Parsed, parse};
use crate::connect::{Address, Awaited, Ended, Options, at, connect_for_options};
use crate::link::{Link, refused};

/// Where to connect: an address, the export, and the name for messages.
#[derive(Clone)]
pub struct Place {
    /// What the user typed.
    pub name: String,
    /// Where the server listens.
    pub address: Address,
    /// The export's name.
    pub export: String,
    /// The TLS settings, if it is required.
    pub tls: Option<Arc<blockhaul_tls::Connector>>,
}

impl Place {
    /// Parses a URI.
    pub fn parse(uri: &str) -> Result<Place> {
        let Parsed { address, export, tls } = parse(uri)?;
        Ok(Place { name: uri.to_string(), address, export, tls })
    }
}

/// A connection in the option phase.
pub struct OptionSession {
    place: Place,
    link: Link,
    options: Options,
    state: State,
}

enum State {
    Asking(Box<Handshake>),
    /// An oldstyle server: it has one export, and has already described it.
    Told(Box<Negotiated>),
}

impl OptionSession {
    /// Connects and negotiates headers and replies.
    pub async fn connect(place: Place, options: &Options) -> Result<OptionSession> {
        let options = Options { tls: place.tls.clone(), ..options.clone() };
        let (link, ended) = connect_for_options(&place.address, &options)
            .await
            .map_err(|error| at(&place.name, &place.address, error))?;
        let state = match ended {
            Ended::Options(handshake) => State::Asking(handshake),
            Ended::Transmission(negotiated) => State::Told(negotiated),
        };
        Ok(OptionSession { place, link, options, state })
    }

    /// The protocol of the server's greeting.
    pub fn protocol(&self) -> Option<Protocol> {
        match &self.state {
            State::Asking(handshake) => handshake.protocol(),
            State::Told(negotiated) => Some(negotiated.protocol),
        }
    }

    /// The form of replies that was negotiated.
    pub fn replies(&self) -> Replies {
        match &self.state {
            State::Asking(handshake) => handshake.replies(),
            State::Told(negotiated) => negotiated.replies,
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
            Event::Listed(entries) => Ok(entries),
            other => Err(self.unexpected(other)),
        }
    }

    /// Facts of an export.
    pub async fn info(&mut self, export: &str) -> Result<ExportInfo> {
        if let State::Told(negotiated) = &self.state {
            return Ok(negotiated.info.clone());
        }
        let wants = Infos { name: true, description: true, block_size: true };
        let asked =
            self.ask("ask about an export", |handshake, out| handshake.info(export, wants, out));
        match asked.await? {
            Event::Info(info) => Ok(*info),
            other => Err(self.unexpected(other)),
        }
    }

    /// Names of the contexts of an export; none if the server does not support contexts.
    pub async fn contexts(&mut self, export: &str) -> Result<Vec<Context>> {
        // Even with simple replies: some servers list contexts that cannot be used then.
        if matches!(self.state, State::Told(_)) {
            return Ok(Vec::new());
        }
        let asked = self.ask("list contexts", |handshake, out| {
            handshake.list_meta_contexts(export, &[] as &[String], out)
        });
        match asked.await? {
            Event::Contexts(contexts) => Ok(contexts),
            Event::Refused { .. } => Ok(Vec::new()),
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
    ) -> Result<Vec<Context>> {
        let what = if select { "select contexts" } else { "list contexts" };
        let asked = self.ask(what, |handshake, out| {
            if select {
                handshake.set_meta_contexts(export, queries, out)
            } else {
                handshake.list_meta_contexts(export, queries, out)
            }
        });
        match asked.await? {
            Event::Contexts(contexts) => Ok(contexts),
            other => Err(self.unexpected(other)),
        }
    }

    // nbd: abort.then-close
    /// Ends the session.
    pub async fn abort(mut self) {
        if matches!(self.state, State::Asking(_)) {
            // The replies do not matter: a server may close at once.
            let _ = self.ask("end the session", |handshake, out| handshake.abort(out)).await;
        }
        self.link.queue.close(&self.link.stream);
    }

    async fn ask(
        &mut self,
        what: &str,
        say: impl FnOnce(&mut Handshake, &mut Vec<u8>) -> Result<(), blockhaul_wire::Error>,
    ) -> Result<Event> {
        let State::Asking(handshake) = &mut self.state else {
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
                let Event::NeedMore { bytes } = event else { return Ok(event) };
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
        let event = Awaited::new("answer").within(self.options.connect_timeout, talk).await;
        if let Ok(Event::Refused { reason: OptionError::Shutdown, .. }) = &event {
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
        let State::Asking(handshake) = &mut self.state else { return };
        let mut out = Vec::new();
        if handshake.abort(&mut out).is_ok() {
            // The server may have closed already.
            let _ = self.link.say(&mut out).await;
        }
    }

    fn unexpected(&self, event: Event) -> Error {
        let error = match event {
            Event::Refused { option, reason, text } => {
                let what = option.to_string();
                refused(&blockhaul_wire::Error::Refused { option, what, reason, text })
            }
            _ => Error::new(Kind::Io, "the server's reply does not match the option"),
        };
        at(&self.place.name, &self.place.address, error)
    }
}
