//! The usual sequence of a client's options, with fallbacks for old servers: STARTTLS if it is
//! required, EXTENDED_HEADERS, else STRUCTURED_REPLY, SET_META_CONTEXT, GO, else EXPORT_NAME.

use super::GreetingForm;
use super::client::{ClientHandshake, ClientHandshakeEvent, ClientHandshakeResult};
use crate::option::{InfoSet, OptionCode, OptionError, check_query, check_string};
use crate::{ProtocolError, ReplyForm, printable};

/// The client's wishes; all but the export are omitted if the server lacks them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NegotiationOptions {
    /// The export; empty for the default one. Oldstyle servers have one export and no names.
    pub export: String,
    /// Contexts to select.
    pub contexts: Vec<String>,
    /// Start TLS first; without it nothing else is sent.
    pub tls: bool,
    /// Request extended headers.
    pub extended: bool,
    /// Request structured replies if there are no extended headers.
    pub structured: bool,
    /// Information to request. A client that requests the block sizes must obey them.
    pub infos: InfoSet,
    /// Where to end.
    pub end: NegotiationGoal,
}

impl NegotiationOptions {
    /// Everything that is useful to a client of `export`, with `base:allocation` as its only
    /// context.
    pub fn new(export: impl Into<String>) -> NegotiationOptions {
        NegotiationOptions {
            export: export.into(),
            contexts: vec![crate::status::BASE_ALLOCATION.to_owned()],
            tls: false,
            extended: true,
            structured: true,
            infos: InfoSet::BLOCK_SIZE,
            end: NegotiationGoal::Transmission,
        }
    }
}

/// Where a negotiation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum NegotiationGoal {
    /// When requests may be sent.
    #[default]
    Transmission,
    /// When headers and replies are negotiated, for callers that send their own options.
    Options,
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum NegotiationStep {
    /// Read; see [`ClientHandshakeEvent::NeedMore`].
    NeedMore {
        /// Number of bytes required for the next call.
        bytes: usize,
    },
    /// Start TLS, then call [`Negotiation::tls_started`] (with [`NegotiationOptions::tls`]).
    StartTls,
    /// Options may be sent through [`Negotiation::into_handshake`] (with [`NegotiationGoal::Options`]).
    Options,
    /// Requests may be sent. Also with [`NegotiationGoal::Options`] when the server is oldstyle.
    Transmission(Box<ClientHandshakeResult>),
}

/// A handshake that runs automatically.
#[derive(Debug)]
pub struct Negotiation {
    wants: NegotiationOptions,
    handshake: ClientHandshake,
    /// TLS has just started.
    resume: bool,
}

impl Negotiation {
    /// Starts a negotiation; the server sends first.
    ///
    /// # Errors
    /// A name or a context that is not a valid string of the protocol.
    pub fn new(wants: NegotiationOptions) -> Result<Negotiation, ProtocolError> {
        check_string("export name", &wants.export)?;
        for context in &wants.contexts {
            check_query(context)?;
        }
        Ok(Negotiation { wants, handshake: ClientHandshake::new(), resume: false })
    }

    /// The handshake, for the caller's own options.
    pub fn into_handshake(self) -> ClientHandshake {
        self.handshake
    }

    /// After [`NegotiationStep::StartTls`]: TLS is established, and later bytes arrive through it. The next
    /// [`Negotiation::receive`] continues.
    ///
    /// # Errors
    /// Like [`ClientHandshake::tls_started`].
    pub fn tls_started(&mut self) -> Result<(), ProtocolError> {
        self.handshake.tls_started()?;
        self.resume = true;
        Ok(())
    }

    /// The server has closed the connection; see [`ClientHandshake::closed`].
    ///
    /// # Errors
    /// Always one, except after a failure that made this side end the session.
    pub fn closed(&self, left: &[u8]) -> Result<(), ProtocolError> {
        self.handshake.closed(left)
    }

    /// Processes received bytes; see [`ClientHandshake::receive`].
    ///
    /// # Errors
    /// The connection must be closed. If the server refused something ([`ProtocolError::Refused`]), `out`
    /// has the end of the session, which should be sent first.
    pub fn receive(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, NegotiationStep), ProtocolError> {
        if std::mem::take(&mut self.resume)
            && let Some(step) = self.first_option(out)?
        {
            return Ok((0, step));
        }
        let mut used = 0;
        loop {
            let (consumed, event) = self.handshake.receive(&input[used..], out)?;
            used += consumed;
            if let Some(step) = self.next(event, out)? {
                return Ok((used, step));
            }
        }
    }

    /// Sends the option that follows an event, or returns a step for the caller.
    fn next(
        &mut self,
        event: ClientHandshakeEvent,
        out: &mut Vec<u8>,
    ) -> Result<Option<NegotiationStep>, ProtocolError> {
        match event {
            ClientHandshakeEvent::NeedMore { bytes } => {
                return Ok(Some(NegotiationStep::NeedMore { bytes }));
            }
            ClientHandshakeEvent::Transmission(negotiated) if self.wants.tls && !negotiated.tls => {
                return Err(too_old_for_tls());
            }
            ClientHandshakeEvent::Transmission(negotiated) => {
                return Ok(Some(NegotiationStep::Transmission(negotiated)));
            }
            // nbd: tls.client-any-mode, tls.client-first
            ClientHandshakeEvent::Greeted(GreetingForm::FixedNewstyle) if self.wants.tls => {
                self.handshake.starttls(out)?;
            }
            ClientHandshakeEvent::StartTls if self.wants.tls => {
                return Ok(Some(NegotiationStep::StartTls));
            }
            ClientHandshakeEvent::Greeted(GreetingForm::FixedNewstyle) => {
                return self.first_option(out);
            }
            ClientHandshakeEvent::Greeted(_) if self.wants.tls => return Err(too_old_for_tls()),
            ClientHandshakeEvent::Greeted(_) if self.wants.end == NegotiationGoal::Options => {
                return Ok(Some(NegotiationStep::Options));
            }
            ClientHandshakeEvent::Greeted(_) => {
                self.handshake.export_name(&self.wants.export, out)?
            }
            ClientHandshakeEvent::Accepted(_) => return self.contexts(out),
            ClientHandshakeEvent::Contexts(_) => self.go(out)?,
            ClientHandshakeEvent::Refused { option, reason, text } => {
                return self.refused(option, reason, text, out);
            }
            ClientHandshakeEvent::StartTls
            | ClientHandshakeEvent::Listed(_)
            | ClientHandshakeEvent::Info(_)
            | ClientHandshakeEvent::Aborted => {
                return Err(ProtocolError::Caller { what: "the negotiation is over" });
            }
        }
        Ok(None)
    }

    // nbd: starttls.first
    /// The first option of a session, or after TLS.
    fn first_option(
        &mut self,
        out: &mut Vec<u8>,
    ) -> Result<Option<NegotiationStep>, ProtocolError> {
        if !self.wants.extended {
            return self.structured(out);
        }
        self.handshake.extended_headers(out)?;
        Ok(None)
    }

    // nbd: abort.no-hard-disconnect
    fn refused(
        &mut self,
        option: OptionCode,
        reason: OptionError,
        text: String,
        out: &mut Vec<u8>,
    ) -> Result<Option<NegotiationStep>, ProtocolError> {
        // TLS_REQD and SHUTDOWN apply to every option that could follow.
        // nbd: abort.shutdown
        let fatal = matches!(reason, OptionError::TlsRequired | OptionError::Shutdown);
        match option {
            OptionCode::ExtendedHeaders if !fatal => return self.structured(out),
            OptionCode::StructuredReply if !fatal => return self.contexts(out),
            OptionCode::SetMetaContext if !fatal => {
                self.go(out)?;
                return Ok(None);
            }
            OptionCode::Go
                if reason == OptionError::Unsupported
                    && self.handshake.replies() != ReplyForm::Extended =>
            {
                self.handshake.export_name(&self.wants.export, out)?;
                return Ok(None);
            }
            _ => {}
        }
        // nbd: abort.soft, tls.client-refused
        self.handshake.abort(out)?;
        let what = match option {
            // nbd: sizes.go, export-name.fallback
            OptionCode::Go => {
                format!("export \"{}\"", printable(self.wants.export.as_bytes(), 256))
            }
            other => other.to_string(),
        };
        Err(ProtocolError::Refused { option, what, reason, text })
    }

    fn structured(&mut self, out: &mut Vec<u8>) -> Result<Option<NegotiationStep>, ProtocolError> {
        if !self.wants.structured {
            return self.contexts(out);
        }
        self.handshake.structured_replies(out)?;
        Ok(None)
    }

    fn contexts(&mut self, out: &mut Vec<u8>) -> Result<Option<NegotiationStep>, ProtocolError> {
        if self.wants.end == NegotiationGoal::Options {
            return Ok(Some(NegotiationStep::Options));
        }
        let contexts = together(&self.wants.contexts, self.handshake.replies());
        if contexts.is_empty() || self.handshake.replies() == ReplyForm::Simple {
            self.go(out)?;
        } else {
            // nbd: meta.select
            self.handshake.set_meta_contexts(&self.wants.export, contexts, out)?;
        }
        Ok(None)
    }

    fn go(&mut self, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        self.handshake.go(&self.wants.export, self.wants.infos, out)
    }
}

/// The contexts that may be selected together. QEMU, whose contexts begin with `qemu:`, may fail in
/// one of them: it then sends an error that ends its reply, and the next context's state after it
/// (`nbd_co_send_block_status` up to 10.0 at least), which no client can follow. With extended
/// headers each request names its contexts; without them, one of QEMU's is selected alone.
fn together(contexts: &[String], replies: ReplyForm) -> &[String] {
    let of_qemu = contexts.iter().position(|context| context.starts_with("qemu:"));
    match of_qemu {
        Some(at) if replies != ReplyForm::Extended => &contexts[at..=at],
        _ => contexts,
    }
}

/// Nothing is sent to a server that does not support what is required.
fn too_old_for_tls() -> ProtocolError {
    let what = "TLS is demanded, and the server speaks an old protocol that has none".to_owned();
    ProtocolError::Unexpected { what }
}
