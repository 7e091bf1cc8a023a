//! The options that a client sends.

use super::{ClientHandshake, ClientHandshakeState, OptionInProgress};
use crate::handshake::GreetingForm;
use crate::option::{
    InfoRequest, InfoSet, MetaRequest, OptionCode, check_query, check_string, emit_option,
};
use crate::{ProtocolError, ReplyForm, limits};

// For the documentation.
#[cfg(doc)]
use crate::handshake::client::ClientHandshakeEvent;

impl ClientHandshake {
    // nbd: list.no-data
    /// Lists the exports: [`ClientHandshakeEvent::Listed`].
    ///
    /// # Errors
    /// [`ProtocolError::Caller`], for this and all other options: an option is in progress, or the server
    /// is not fixed newstyle, or the handshake has ended.
    pub fn list(&mut self, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        self.send(OptionCode::List, "", &[], out)
    }

    // nbd: baseline.options
    /// Queries an export: [`ClientHandshakeEvent::Info`].
    ///
    /// # Errors
    /// Like [`ClientHandshake::list`]; a name that is not a valid string of the protocol.
    pub fn info(
        &mut self,
        export: &str,
        wants: InfoSet,
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        self.send_info(OptionCode::Info, export, wants, out)
    }

    /// Chooses an export: [`ClientHandshakeEvent::Transmission`]. A client that requests the block sizes must obey
    /// them.
    ///
    /// # Errors
    /// Like [`ClientHandshake::info`].
    pub fn go(
        &mut self,
        export: &str,
        wants: InfoSet,
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        self.send_info(OptionCode::Go, export, wants, out)
    }

    /// Chooses an export with EXPORT_NAME, which the server can only refuse by closing the
    /// connection: [`ClientHandshakeEvent::Transmission`].
    ///
    /// # Errors
    /// Like [`ClientHandshake::info`], but plain newstyle is allowed; extended headers were negotiated.
    pub fn export_name(&mut self, export: &str, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        check_string("export name", export)?;
        if !matches!(self.state, ClientHandshakeState::Idle) {
            return Err(ProtocolError::Caller { what: "no option can be sent now" });
        }
        if self.replies == ReplyForm::Extended {
            // nbd: extended.no-export-name
            return Err(ProtocolError::Caller {
                what: "EXPORT_NAME cannot be sent with extended headers",
            });
        }
        emit_option(OptionCode::ExportName, export.as_bytes(), out);
        self.state = ClientHandshakeState::ExportName(export.to_owned());
        Ok(())
    }

    // nbd: structured.no-data
    /// Requests structured replies: [`ClientHandshakeEvent::Accepted`].
    ///
    /// # Errors
    /// Like [`ClientHandshake::list`]; they or extended headers are in use.
    pub fn structured_replies(&mut self, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        if self.replies != ReplyForm::Simple {
            return Err(ProtocolError::Caller { what: "structured replies are in use" });
        }
        self.send(OptionCode::StructuredReply, "", &[], out)
    }

    // nbd: extended.no-data
    /// Requests extended headers, which include structured replies: [`ClientHandshakeEvent::Accepted`].
    ///
    /// # Errors
    /// Like [`ClientHandshake::list`]; they are in use.
    pub fn extended_headers(&mut self, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        if self.replies == ReplyForm::Extended {
            return Err(ProtocolError::Caller { what: "extended headers are in use" });
        }
        self.send(OptionCode::ExtendedHeaders, "", &[], out)
    }

    /// Lists the contexts of an export, all or those that match: [`ClientHandshakeEvent::Contexts`], whose numbers
    /// are meaningless. Servers require structured replies first.
    ///
    /// # Errors
    /// Like [`ClientHandshake::info`]; a query that is not a valid string of the protocol, or has no
    /// namespace; too many queries.
    pub fn list_meta_contexts(
        &mut self,
        export: &str,
        queries: &[String],
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        self.send_contexts(OptionCode::ListMetaContext, export, queries, out)
    }

    /// Selects contexts of an export, replacing an earlier selection: [`ClientHandshakeEvent::Contexts`]. The
    /// selection is valid if the same export is chosen afterwards.
    ///
    /// # Errors
    /// Like [`ClientHandshake::list_meta_contexts`]; structured replies are not in use.
    pub fn set_meta_contexts(
        &mut self,
        export: &str,
        queries: &[String],
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        if self.replies == ReplyForm::Simple {
            // nbd: meta.structured, structured.extensions, meta.set-needs-structured
            return Err(ProtocolError::Caller { what: "contexts need structured replies" });
        }
        self.send_contexts(OptionCode::SetMetaContext, export, queries, out)?;
        self.selected = None;
        Ok(())
    }

    // nbd: starttls.no-data
    /// Requests TLS: [`ClientHandshakeEvent::StartTls`].
    ///
    /// # Errors
    /// Like [`ClientHandshake::list`]; TLS is in use.
    pub fn starttls(&mut self, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        // nbd: tls.client-starttls-once
        if self.tls {
            return Err(ProtocolError::Caller { what: "TLS is in use" });
        }
        self.send(OptionCode::StartTls, "", &[], out)
    }

    /// Ends the session: [`ClientHandshakeEvent::Aborted`], or the server closes without a reply.
    ///
    /// # Errors
    /// Like [`ClientHandshake::list`].
    pub fn abort(&mut self, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        self.send(OptionCode::Abort, "", &[], out)
    }

    fn send_info(
        &mut self,
        code: OptionCode,
        export: &str,
        wants: InfoSet,
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        check_string("export name", export)?;
        let mut payload = Vec::new();
        InfoRequest { name: export.to_owned(), wants }.emit(&mut payload);
        self.send(code, export, &payload, out)
    }

    fn send_contexts(
        &mut self,
        code: OptionCode,
        export: &str,
        queries: &[String],
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        check_string("export name", export)?;
        for query in queries {
            check_query(query)?;
        }
        if queries.len() > limits::QUERIES {
            let len = queries.len() as u64;
            let max = limits::QUERIES as u64;
            return Err(ProtocolError::TooLong { what: "list of context queries", len, max });
        }
        let mut payload = Vec::new();
        let queries = queries.to_vec();
        MetaRequest { export: export.to_owned(), queries }.emit(&mut payload);
        self.send(code, export, &payload, out)
    }

    fn send(
        &mut self,
        code: OptionCode,
        export: &str,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        // nbd: handshake.one-option
        if !matches!(self.state, ClientHandshakeState::Idle) {
            return Err(ProtocolError::Caller { what: "no option can be sent now" });
        }
        // nbd: tls.client-fixed-newstyle
        if self.protocol != Some(GreetingForm::FixedNewstyle) {
            return Err(ProtocolError::Caller { what: "the server is too old for this option" });
        }
        emit_option(code, payload, out);
        self.state = ClientHandshakeState::Waiting(OptionInProgress::new(code, export));
        Ok(())
    }
}
