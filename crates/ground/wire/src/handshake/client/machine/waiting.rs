//! An option that was sent, until its last reply has arrived.

use crate::option::{
    BlockSizeInfo, InfoItem, ListEntry, MetaContext, OptionCode, OptionReplyHeader, ReplyCode,
};
use crate::{ExportFlags, ProtocolError, limits};

/// An option in progress, and the contents of its replies.
#[derive(Debug)]
pub(super) struct OptionInProgress {
    pub(super) code: OptionCode,
    pub(super) export: String,
    pub(super) entries: Vec<ListEntry>,
    pub(super) entries_bytes: usize,
    pub(super) contexts: Vec<MetaContext>,
    pub(super) infos: usize,
    pub(super) exports: Option<(u64, ExportFlags)>,
    pub(super) block_sizes: Option<BlockSizeInfo>,
    pub(super) name: Option<String>,
    pub(super) description: Option<String>,
}

impl OptionInProgress {
    pub(super) fn new(code: OptionCode, export: &str) -> OptionInProgress {
        OptionInProgress {
            code,
            export: export.to_owned(),
            entries: Vec::new(),
            entries_bytes: 0,
            contexts: Vec::new(),
            infos: 0,
            exports: None,
            block_sizes: None,
            name: None,
            description: None,
        }
    }

    /// Processes a reply that is not the last.
    pub(super) fn take(
        &mut self,
        head: OptionReplyHeader,
        payload: &[u8],
    ) -> Result<(), ProtocolError> {
        match (self.code, head.code) {
            (OptionCode::List, ReplyCode::Server) => {
                self.entries_bytes += payload.len();
                below("the server's list of exports", self.entries.len(), limits::EXPORTS)?;
                below("the server's list of exports", self.entries_bytes, limits::LIST_BYTES)?;
                self.entries.push(ListEntry::parse(payload)?);
            }
            (OptionCode::Info | OptionCode::Go, ReplyCode::Info) => {
                self.infos += 1;
                below("the server's list of information", self.infos, limits::INFOS)?;
                // nbd: info.no-order
                match InfoItem::parse(payload)? {
                    InfoItem::Export { size, flags } => self.exports = Some((size, flags)),
                    InfoItem::Name(name) => self.name = Some(name),
                    InfoItem::Description(text) => self.description = Some(text),
                    InfoItem::BlockSize(sizes) => self.block_sizes = Some(sizes),
                    // nbd: info.unknown-reply
                    InfoItem::Other(_) => {}
                }
            }
            // nbd: meta.list-id
            (OptionCode::ListMetaContext, ReplyCode::MetaContext) => {
                let held = self.contexts.len();
                let max = limits::CONTEXTS_LISTED;
                below("the server's list of contexts", held, max)?;
                self.contexts.push(MetaContext::parse(payload)?);
            }
            (OptionCode::SetMetaContext, ReplyCode::MetaContext) => {
                let held = self.contexts.len();
                let max = limits::CONTEXTS;
                below("the server's list of contexts", held, max)?;
                let context = MetaContext::parse(payload)?;
                if self.contexts.iter().any(|before| before.id == context.id) {
                    let why = "two contexts have the same number";
                    return Err(ProtocolError::Malformed { what: "list of contexts", why });
                }
                self.contexts.push(context);
            }
            (option, reply) => {
                let what = format!("the server answered {option} with {reply:?}");
                return Err(ProtocolError::Unexpected { what });
            }
        }
        Ok(())
    }
}

/// Checks that a list of `held` entries may grow by one.
fn below(what: &'static str, held: usize, max: usize) -> Result<(), ProtocolError> {
    if held < max {
        return Ok(());
    }
    Err(ProtocolError::TooLong { what, len: held as u64 + 1, max: max as u64 })
}
