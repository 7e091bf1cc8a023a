//! Handles a client's options: which are accepted, which become a query to the caller, and which
//! are refused.

use super::{ServerHandshake, ServerHandshakeState};
use crate::handshake::server::{ServerHandshakeEvent, TlsRequirement};
use crate::option::{
    InfoRequest, InfoSet, MetaRequest, OptionCode, OptionError, OptionHeader, ReplyCode,
    emit_error, emit_reply, string,
};
use crate::{ClientFlags, ProtocolError, ReplyForm, limits};

/// The refusal of an option with a payload that has none.
const NO_DATA: &str = "this option has no data";

impl ServerHandshake {
    /// Starts to skip a payload that is too long, or not needed (ABORT).
    pub(super) fn start_skip(&mut self, head: OptionHeader) -> Result<(), ProtocolError> {
        self.begin_option(head.code)?;
        if head.length > limits::OPTION_SKIP {
            let len = head.length.into();
            let max = limits::OPTION_SKIP.into();
            return Err(ProtocolError::TooLong { what: "payload of an option", len, max });
        }
        if head.code == OptionCode::ExportName {
            return Err(ProtocolError::CannotRefuse {
                why: "the export's name is too long".to_owned(),
            });
        }
        self.state = ServerHandshakeState::Skip { left: head.length, code: head.code };
        Ok(())
    }

    pub(super) fn end_skip(
        &mut self,
        code: OptionCode,
        out: &mut Vec<u8>,
    ) -> Option<ServerHandshakeEvent> {
        self.state = ServerHandshakeState::Options;
        // nbd: abort.data
        if code == OptionCode::Abort {
            self.state = ServerHandshakeState::Over;
            // nbd: abort.ack
            emit_reply(code, ReplyCode::Ack, &[], out);
            return Some(ServerHandshakeEvent::Abort);
        }
        let (error, text) = match (self.forbidden(code), code) {
            (Some(refusal), _) => refusal,
            // nbd: baseline.unsupported
            (None, OptionCode::Other(_)) => (OptionError::Unsupported, "the option is not known"),
            (None, _) => (OptionError::TooBig, "the option is too long"),
        };
        self.note_odd(code, error, text);
        emit_error(code, error, text, out);
        None
    }

    /// Why no option of this kind is accepted now, whatever its payload.
    fn forbidden(&self, code: OptionCode) -> Option<(OptionError, &'static str)> {
        // nbd: abort.server-shutdown
        if self.stopping {
            return Some((OptionError::Shutdown, "the server is stopping"));
        }
        // nbd: tls.no-reqd-without-tls, tls.reqd, tls.reqd-go, tls.no-reqd-after
        // nbd: tls.reqd-info-only, info.forced-tls
        let plain = self.config.tls == TlsRequirement::Required && !self.tls;
        if plain && code != OptionCode::StartTls {
            return Some((OptionError::TlsRequired, "TLS must be started first"));
        }
        None
    }

    /// Counts an option, and checks that the client may send it at all.
    pub(super) fn begin_option(&mut self, code: OptionCode) -> Result<(), ProtocolError> {
        self.options += 1;
        let harmless = matches!(code, OptionCode::StartTls | OptionCode::Abort);
        self.turned_away |= self.config.tls == TlsRequirement::Required && !self.tls && !harmless;
        if self.options > self.allowed {
            let len = self.options.into();
            let max = self.allowed.into();
            return Err(ProtocolError::TooLong { what: "the client's list of options", len, max });
        }
        // nbd: handshake.options-need-fixed, tls.fixed-newstyle
        if !self.client.contains(ClientFlags::FIXED_NEWSTYLE) && code != OptionCode::ExportName {
            return Err(ProtocolError::Unexpected {
                what: format!("the client sent {code} without fixed newstyle"),
            });
        }
        if code == OptionCode::SetMetaContext {
            // nbd: meta.set-replaces
            // It replaces the earlier selection, even if it fails.
            self.selected = None;
        }
        Ok(())
    }

    // nbd: abort.server-errors-options
    /// Handles one complete option; returns an event if the caller must handle it.
    pub(super) fn option(
        &mut self,
        code: OptionCode,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<ServerHandshakeEvent>, ProtocolError> {
        let (error, text) = if let Some(refusal) = self.forbidden(code) {
            refusal
        } else {
            match self.known_option(code, payload, out)? {
                OptionOutcome::Event(event) => return Ok(Some(event)),
                OptionOutcome::Answered => return Ok(None),
                OptionOutcome::Refused(error, text) => (error, text),
            }
        };
        // The caller gets errors that end the connection.
        if code != OptionCode::ExportName {
            self.note_odd(code, error, text);
        }
        self.refuse(code, error, text, out)?;
        Ok(None)
    }

    // nbd: baseline.options
    fn known_option(
        &mut self,
        code: OptionCode,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<OptionOutcome, ProtocolError> {
        use OptionOutcome::Refused;
        let with_data = !payload.is_empty();
        Ok(match code {
            OptionCode::ExportName if self.replies == ReplyForm::Extended => {
                Refused(OptionError::Invalid, "extended headers need GO instead of EXPORT_NAME")
            }
            OptionCode::ExportName => match string("export name", payload) {
                Err(_) => Refused(OptionError::Invalid, "the export's name is malformed"),
                Ok(name) => {
                    let name = name.to_owned();
                    self.ask_export(code, InfoRequest { name, wants: InfoSet::default() })
                }
            },
            // nbd: extended.go
            OptionCode::Info | OptionCode::Go => match InfoRequest::parse(payload) {
                Err(_) => Refused(OptionError::Invalid, "malformed request for information"),
                Ok(request) => self.ask_export(code, request),
            },
            // nbd: list.data-refused, starttls.reply
            OptionCode::List | OptionCode::StartTls if with_data => {
                Refused(OptionError::Invalid, NO_DATA)
            }
            OptionCode::List => {
                self.state = ServerHandshakeState::AskList;
                OptionOutcome::Event(ServerHandshakeEvent::List)
            }
            // nbd: tls.starttls-twice
            OptionCode::StartTls if self.tls => Refused(OptionError::Invalid, "TLS is in use"),
            // nbd: tls.starttls-refused
            OptionCode::StartTls if self.config.tls == TlsRequirement::Off => {
                Refused(OptionError::Unsupported, "TLS is not offered")
            }
            OptionCode::StartTls => self.start_tls(out),
            OptionCode::StructuredReply if self.config.structured => {
                self.structured_replies(with_data, out)
            }
            OptionCode::ExtendedHeaders if self.config.extended => {
                self.extended_headers(with_data, out)
            }
            OptionCode::ListMetaContext | OptionCode::SetMetaContext
                if self.config.meta_contexts =>
            {
                self.ask_contexts(code, payload)
            }
            // nbd: reply.unsupported
            _ => Refused(OptionError::Unsupported, "the option is not known"),
        })
    }

    fn start_tls(&mut self, out: &mut Vec<u8>) -> OptionOutcome {
        // nbd: starttls.forgets, extended.starttls-forgets
        self.replies = ReplyForm::Simple;
        self.selected = None;
        self.state = ServerHandshakeState::AwaitTls;
        // nbd: tls.starttls-accepted
        emit_reply(OptionCode::StartTls, ReplyCode::Ack, &[], out);
        OptionOutcome::Event(ServerHandshakeEvent::StartTls)
    }

    // nbd: structured.data-refused
    fn structured_replies(&mut self, with_data: bool, out: &mut Vec<u8>) -> OptionOutcome {
        use OptionOutcome::Refused;
        match (with_data, self.replies) {
            (true, _) => Refused(OptionError::Invalid, NO_DATA),
            (_, ReplyForm::Extended) => Refused(
                OptionError::ExtendedHeadersRequired,
                // nbd: extended.structured-refused
                "extended headers are in use, they replace structured replies",
            ),
            (_, ReplyForm::Structured) => {
                Refused(OptionError::Invalid, "structured replies are in use")
            }
            (_, ReplyForm::Simple) => {
                self.acknowledge(OptionCode::StructuredReply, ReplyForm::Structured, out)
            }
        }
    }

    // nbd: extended.data-refused
    fn extended_headers(&mut self, with_data: bool, out: &mut Vec<u8>) -> OptionOutcome {
        use OptionOutcome::Refused;
        match (with_data, self.replies) {
            (true, _) => Refused(OptionError::Invalid, NO_DATA),
            (_, ReplyForm::Extended) => {
                Refused(OptionError::Invalid, "extended headers are in use")
            }
            _ => self.acknowledge(OptionCode::ExtendedHeaders, ReplyForm::Extended, out),
        }
    }

    fn ask_export(&mut self, code: OptionCode, request: InfoRequest) -> OptionOutcome {
        if request.name.len() > self.config.name {
            return OptionOutcome::Refused(OptionError::TooBig, NAME_TOO_LONG);
        }
        let name = request.name.clone();
        let wants = request.wants;
        self.state = ServerHandshakeState::AskExport { code, request };
        OptionOutcome::Event(ServerHandshakeEvent::Export {
            name,
            wants,
            go: code != OptionCode::Info,
        })
    }

    // nbd: extended.base-needs-none
    /// LIST_META_CONTEXT and SET_META_CONTEXT.
    fn ask_contexts(&mut self, code: OptionCode, payload: &[u8]) -> OptionOutcome {
        use OptionOutcome::Refused;
        // nbd: meta.set-refused
        if self.replies == ReplyForm::Simple {
            let text = "contexts need structured replies or extended headers";
            return Refused(OptionError::Invalid, text);
        }
        match MetaRequest::parse(payload) {
            Err(ProtocolError::TooLong { what: crate::option::QUERIES, .. }) => {
                Refused(OptionError::TooBig, "too many queries")
            }
            // nbd: meta.malformed
            Err(_) => Refused(OptionError::Invalid, "malformed request for contexts"),
            Ok(MetaRequest { queries, .. }) if queries.len() > self.config.queries => {
                Refused(OptionError::TooBig, "too many queries")
            }
            Ok(MetaRequest { export, .. }) if export.len() > self.config.name => {
                Refused(OptionError::TooBig, NAME_TOO_LONG)
            }
            Ok(MetaRequest { export, queries }) => {
                let set = code == OptionCode::SetMetaContext;
                let empty = queries.is_empty();
                self.state =
                    ServerHandshakeState::AskContexts { code, export: export.clone(), empty };
                OptionOutcome::Event(ServerHandshakeEvent::MetaContext { export, queries, set })
            }
        }
    }

    fn acknowledge(
        &mut self,
        code: OptionCode,
        replies: ReplyForm,
        out: &mut Vec<u8>,
    ) -> OptionOutcome {
        self.replies = replies;
        emit_reply(code, ReplyCode::Ack, &[], out);
        OptionOutcome::Answered
    }
}

const NAME_TOO_LONG: &str = "the export's name is longer than this server takes";

/// The result of an option.
enum OptionOutcome {
    Event(ServerHandshakeEvent),
    Answered,
    Refused(OptionError, &'static str),
}
