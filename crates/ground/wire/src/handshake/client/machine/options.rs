//! The options that a client sends.

use super::{Handshake, State, Waiting};
use crate::handshake::Protocol;
use crate::option::{
    InfoRequest, Infos, MetaRequest, OptionCode, check_query, check_string, emit_option,
};
use crate::{Error, Replies, limits};

// For the documentation.
#[cfg(doc)]
use crate::handshake::client::Event;

impl Handshake {
    // nbd: list.no-data
    /// Lists the exports: [`Event::Listed`].
    ///
    /// # Errors
    /// [`Error::Caller`], for this and all other options: an option is in progress, or the server
    /// is not fixed newstyle, or the handshake has ended.
    pub fn list(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        self.send(OptionCode::List, "", &[], out)
    }

    // nbd: baseline.options
    /// Queries an export: [`Event::Info`].
    ///
    /// # Errors
    /// Like [`Handshake::list`]; a name that is not a valid string of the protocol.
    pub fn info(&mut self, export: &str, wants: Infos, out: &mut Vec<u8>) -> Result<(), Error> {
        self.send_info(OptionCode::Info, export, wants, out)
    }

    /// Chooses an export: [`Event::Transmission`]. A client that requests the block sizes must obey
    /// them.
    ///
    /// # Errors
    /// Like [`Handshake::info`].
    pub fn go(&mut self, export: &str, wants: Infos, out: &mut Vec<u8>) -> Result<(), Error> {
        self.send_info(OptionCode::Go, export, wants, out)
    }

    /// Chooses an export with EXPORT_NAME, which the server can only refuse by closing the
    /// connection: [`Event::Transmission`].
    ///
    /// # Errors
    /// Like [`Handshake::info`], but plain newstyle is allowed; extended headers were negotiated.
    pub fn export_name(&mut self, export: &str, out: &mut Vec<u8>) -> Result<(), Error> {
        check_string("export name", export)?;
        if !matches!(self.state, State::Idle) {
            return Err(Error::Caller { what: "no option can be sent now" });
        }
        if self.replies == Replies::Extended {
            // nbd: extended.no-export-name
            return Err(Error::Caller { what: "EXPORT_NAME cannot be sent with extended headers" });
        }
        emit_option(OptionCode::ExportName, export.as_bytes(), out);
        self.state = State::ExportName(export.to_owned());
        Ok(())
    }

    // nbd: structured.no-data
    /// Requests structured replies: [`Event::Accepted`].
    ///
    /// # Errors
    /// Like [`Handshake::list`]; they or extended headers are in use.
    pub fn structured_replies(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        if self.replies != Replies::Simple {
            return Err(Error::Caller { what: "structured replies are in use" });
        }
        self.send(OptionCode::StructuredReply, "", &[], out)
    }

    // nbd: extended.no-data
    /// Requests extended headers, which include structured replies: [`Event::Accepted`].
    ///
    /// # Errors
    /// Like [`Handshake::list`]; they are in use.
    pub fn extended_headers(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        if self.replies == Replies::Extended {
            return Err(Error::Caller { what: "extended headers are in use" });
        }
        self.send(OptionCode::ExtendedHeaders, "", &[], out)
    }

    /// Lists the contexts of an export, all or those that match: [`Event::Contexts`], whose numbers
    /// are meaningless. Servers require structured replies first.
    ///
    /// # Errors
    /// Like [`Handshake::info`]; a query that is not a valid string of the protocol, or has no
    /// namespace; too many queries.
    pub fn list_meta_contexts(
        &mut self,
        export: &str,
        queries: &[String],
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        self.send_contexts(OptionCode::ListMetaContext, export, queries, out)
    }

    /// Selects contexts of an export, replacing an earlier selection: [`Event::Contexts`]. The
    /// selection is valid if the same export is chosen afterwards.
    ///
    /// # Errors
    /// Like [`Handshake::list_meta_contexts`]; structured replies are not in use.
    pub fn set_meta_contexts(
        &mut self,
        export: &str,
        queries: &[String],
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if self.replies == Replies::Simple {
            // nbd: meta.structured, structured.extensions, meta.set-needs-structured
            return Err(Error::Caller { what: "contexts need structured replies" });
        }
        self.send_contexts(OptionCode::SetMetaContext, export, queries, out)?;
        self.selected = None;
        Ok(())
    }

    // nbd: starttls.no-data
    /// Requests TLS: [`Event::StartTls`].
    ///
    /// # Errors
    /// Like [`Handshake::list`]; TLS is in use.
    pub fn starttls(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        // nbd: tls.client-starttls-once
        if self.tls {
            return Err(Error::Caller { what: "TLS is in use" });
        }
        self.send(OptionCode::StartTls, "", &[], out)
    }

    /// Ends the session: [`Event::Aborted`], or the server closes without a reply.
    ///
    /// # Errors
    /// Like [`Handshake::list`].
    pub fn abort(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        self.send(OptionCode::Abort, "", &[], out)
    }

    fn send_info(
        &mut self,
        code: OptionCode,
        export: &str,
        wants: Infos,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
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
    ) -> Result<(), Error> {
        check_string("export name", export)?;
        for query in queries {
            check_query(query)?;
        }
        if queries.len() > limits::QUERIES {
            let len = queries.len() as u64;
            let max = limits::QUERIES as u64;
            return Err(Error::TooLong { what: "list of context queries", len, max });
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
    ) -> Result<(), Error> {
        // nbd: handshake.one-option
        if !matches!(self.state, State::Idle) {
            return Err(Error::Caller { what: "no option can be sent now" });
        }
        // nbd: tls.client-fixed-newstyle
        if self.protocol != Some(Protocol::FixedNewstyle) {
            return Err(Error::Caller { what: "the server is too old for this option" });
        }
        emit_option(code, payload, out);
        self.state = State::Waiting(Waiting::new(code, export));
        Ok(())
    }
}
