//! Answers of the server's caller to queries of a client: an export, the list of exports, contexts.

use super::{ServerHandshake, ServerHandshakeState, sendable};
use crate::handshake::server::{ExportReply, OptionRefusal, ServerHandshakeResult, plain_flags};
use crate::option::{
    BlockSizeInfo, InfoItem, InfoRequest, ListEntry, MetaContext, OptionCode, OptionError,
    ReplyCode, check_string, emit_reply,
};
use crate::{ClientFlags, ExportFlags, ProtocolError, ReplyForm, RequestForm, limits, magic};

// For the documentation.
#[cfg(doc)]
use crate::handshake::server::ServerHandshakeEvent;

impl ServerHandshake {
    /// Answers [`ServerHandshakeEvent::Export`]. If the client chose the export and may have it, the next
    /// [`ServerHandshake::receive`] returns [`ServerHandshakeEvent::Transmission`].
    ///
    /// # Errors
    /// [`ProtocolError::CannotRefuse`] if the client used EXPORT_NAME, which can only be refused by closing
    /// the connection. [`ProtocolError::Caller`] if there was no query, or for names and block sizes that
    /// violate the protocol.
    pub fn answer_export(
        &mut self,
        answer: Result<ExportReply, OptionRefusal>,
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        let ServerHandshakeState::AskExport { code, request } =
            std::mem::replace(&mut self.state, ServerHandshakeState::Options)
        else {
            return Err(ProtocolError::Caller { what: "no question about an export is open" });
        };
        let info = match answer {
            Ok(info) => info,
            Err(refusal) => return self.refuse(code, refusal.error, &refusal.text, out),
        };
        if info.block_sizes.is_some_and(|sizes| !sizes.is_valid()) {
            return Err(ProtocolError::Caller {
                what: "the export's block sizes break the protocol's rules",
            });
        }
        let contexts = match &self.selected {
            Some((export, contexts)) if *export == request.name => contexts.clone(),
            _ => Vec::new(),
        };
        let flags = self.flags(&info, !contexts.is_empty());
        if code != OptionCode::ExportName {
            emit_info(code, &request, &info, flags, out)?;
        }
        // nbd: info.block-size-reqd
        if info.require_block_sizes && info.block_sizes.is_some() && !request.wants.block_size {
            let text = "this export has block sizes that must be obeyed, ask for them";
            return self.refuse(code, OptionError::BlockSizeRequired, text, out);
        }
        match code {
            OptionCode::ExportName => {
                out.extend_from_slice(&info.size.to_be_bytes());
                out.extend_from_slice(&flags.bits().to_be_bytes());
                // nbd: handshake.no-zeroes
                if !self.client.contains(ClientFlags::NO_ZEROES) {
                    out.extend_from_slice(&[0; magic::RESERVED_ZEROES]);
                }
            }
            // nbd: go.no-zeroes
            _ => emit_reply(code, ReplyCode::Ack, &[], out),
        }
        if code != OptionCode::Info {
            self.state = ServerHandshakeState::Ready(Box::new(ServerHandshakeResult {
                export: request.name,
                headers: match self.replies {
                    // nbd: extended.replies
                    ReplyForm::Extended => RequestForm::Extended,
                    ReplyForm::Simple | ReplyForm::Structured => RequestForm::Compact,
                },
                replies: self.replies,
                contexts,
                flags,
                // nbd: info.no-assumption
                obeys_block_sizes: request.wants.block_size && info.block_sizes.is_some(),
                tls: self.tls,
            }));
        }
        Ok(())
    }

    /// Answers [`ServerHandshakeEvent::List`] with the exports, in the order in which clients will see them.
    ///
    /// # Errors
    /// [`ProtocolError::Caller`] if there was no query, or for a name that is not a valid string of the
    /// protocol.
    pub fn answer_list(
        &mut self,
        answer: Result<&[ListEntry], OptionRefusal>,
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        let ServerHandshakeState::AskList =
            std::mem::replace(&mut self.state, ServerHandshakeState::Options)
        else {
            return Err(ProtocolError::Caller { what: "no question for the exports is open" });
        };
        let entries = match answer {
            Ok(entries) => entries,
            Err(refusal) => {
                return self.refuse(OptionCode::List, refusal.error, &refusal.text, out);
            }
        };
        for entry in entries {
            sendable_name(&entry.name)?;
            let description = sendable(&entry.description);
            let mut payload = Vec::new();
            ListEntry { name: entry.name.clone(), description }.emit(&mut payload);
            emit_reply(OptionCode::List, ReplyCode::Server, &payload, out);
        }
        emit_reply(OptionCode::List, ReplyCode::Ack, &[], out);
        // A client may query each of them; listing again allows nothing more.
        #[expect(clippy::cast_possible_truncation, reason = "bounded by limits::EXPORTS")]
        let listed = entries.len().min(limits::EXPORTS) as u32;
        let allowed = self.config.options.saturating_add(listed * limits::OPTIONS_PER_EXPORT);
        self.allowed = self.allowed.max(allowed);
        Ok(())
    }

    /// Answers [`ServerHandshakeEvent::MetaContext`] with the contexts that match. Their numbers must differ if
    /// they are selected, and are meaningless if they are listed.
    ///
    /// # Errors
    /// [`ProtocolError::Caller`] if there was no query, or for a duplicate number or a name that is not a
    /// valid string of the protocol.
    pub fn answer_contexts(
        &mut self,
        answer: Result<Vec<MetaContext>, OptionRefusal>,
        out: &mut Vec<u8>,
    ) -> Result<(), ProtocolError> {
        let ServerHandshakeState::AskContexts { code, export, empty } =
            std::mem::replace(&mut self.state, ServerHandshakeState::Options)
        else {
            return Err(ProtocolError::Caller { what: "no question about contexts is open" });
        };
        let set = code == OptionCode::SetMetaContext;
        let mut contexts = match answer {
            Ok(contexts) => contexts,
            Err(refusal) => return self.refuse(code, refusal.error, &refusal.text, out),
        };
        // nbd: meta.set-none
        if set && empty {
            contexts.clear();
        }
        if set && contexts.len() > limits::CONTEXTS {
            return self.refuse(code, OptionError::TooBig, "too many contexts are selected", out);
        }
        for (i, context) in contexts.iter().enumerate() {
            sendable_name(&context.name)?;
            // nbd: meta.set-replies
            if set && contexts[..i].iter().any(|before| before.id == context.id) {
                return Err(ProtocolError::Caller { what: "two contexts have the same number" });
            }
        }
        for context in &contexts {
            let id = if set { context.id } else { 0 };
            let mut payload = Vec::new();
            MetaContext { id, name: context.name.clone() }.emit(&mut payload);
            // nbd: meta.none-found, meta.list-replies
            emit_reply(code, ReplyCode::MetaContext, &payload, out);
        }
        emit_reply(code, ReplyCode::Ack, &[], out);
        if set {
            self.selected = Some((export, contexts));
        }
        Ok(())
    }

    // nbd: info.same-as-go
    /// The export's flags, adjusted to what was negotiated: the same for INFO and GO.
    fn flags(&self, info: &ExportReply, has_contexts: bool) -> ExportFlags {
        // nbd: flags.has-flags
        let flags = info.flags | ExportFlags::HAS_FLAGS;
        if self.replies == ReplyForm::Simple {
            // nbd: flags.df-clear
            return plain_flags(flags);
        }
        // nbd: extended.payload-flag, extended.payload-flag-go
        let payload = self.replies == ReplyForm::Extended && has_contexts;
        let df = flags.contains(ExportFlags::SEND_DF);
        plain_flags(flags)
            // nbd: flags.df-set
            .with(ExportFlags::SEND_DF, df)
            .with(ExportFlags::BLOCK_STATUS_PAYLOAD, payload)
    }
}

/// Appends the replies of INFO and GO that describe an export.
fn emit_info(
    code: OptionCode,
    request: &InfoRequest,
    info: &ExportReply,
    flags: ExportFlags,
    out: &mut Vec<u8>,
) -> Result<(), ProtocolError> {
    // nbd: info.export
    let mut items = vec![InfoItem::Export { size: info.size, flags }];
    if request.wants.name {
        let name = info.name.as_ref().unwrap_or(&request.name);
        sendable_name(name)?;
        items.push(InfoItem::Name(name.clone()));
    }
    if let (true, Some(description)) = (request.wants.description, &info.description) {
        items.push(InfoItem::Description(sendable(description)));
    }
    // nbd: sizes.advertised, info.sizes-requested
    // Sizes that differ from the defaults should be sent even if not requested.
    if let Some(sizes) = info.block_sizes
        && (request.wants.block_size || sizes != BlockSizeInfo::DEFAULT)
    {
        items.push(InfoItem::BlockSize(sizes));
    }
    for item in items {
        let mut payload = Vec::new();
        item.emit(&mut payload);
        emit_reply(code, ReplyCode::Info, &payload, out);
    }
    Ok(())
}

// nbd: meta.name-utf8
fn sendable_name(name: &str) -> Result<(), ProtocolError> {
    check_string("name", name).map_err(|_| ProtocolError::Caller {
        what: "a name is longer than 4096 bytes or holds a NUL",
    })
}
