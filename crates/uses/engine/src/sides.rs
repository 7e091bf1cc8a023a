//! The two disks of a copy, and handles to them.

use std::rc::Rc;
use std::sync::Arc;

use blockhaul_block::Device;
use blockhaul_catalog::Stack;

use crate::error::Result;
use crate::handle::{ReconnectingHandle, RetryControl};
use crate::lane::Lane;
use crate::options::EngineOptions;
use crate::selection::Selection;
use crate::shared::EngineState;
use crate::side::Side;

/// The two disks of a copy.
#[derive(Clone)]
pub(crate) struct DiskPair {
    pub(crate) source: Stack,
    pub(crate) target: Stack,
}

impl DiskPair {
    /// The range of the source that the options select.
    pub(crate) fn selection(&self, options: &EngineOptions) -> Result<Selection> {
        let from = self.source.device().facts();
        let to = self.target.device().facts();
        Selection::new(options, &from, from.block.minimum.max(to.block.minimum))
    }

    /// A separate handle on the first connection, for requests outside the lanes.
    pub(crate) fn handle(&self, side: Side, retries: &Arc<RetryControl>) -> Rc<ReconnectingHandle> {
        let stack = match side {
            Side::Source => &self.source,
            Side::Target => &self.target,
        };
        Rc::new(ReconnectingHandle::new(
            side,
            stack.clone(),
            stack.device().clone(),
            retries.clone(),
        ))
    }

    /// A lane over the first connection to each side.
    pub(crate) fn first_lane(&self, shared: &Arc<EngineState>, first: bool) -> Rc<Lane> {
        let from = self.source.device().clone();
        let to = self.target.device().clone();
        self.lane(shared, from, to, first)
    }

    /// A lane over these connections.
    pub(crate) fn lane(
        &self,
        shared: &Arc<EngineState>,
        from: Arc<dyn Device>,
        to: Arc<dyn Device>,
        first: bool,
    ) -> Rc<Lane> {
        let retries = &shared.retries;
        let source =
            ReconnectingHandle::new(Side::Source, self.source.clone(), from, retries.clone());
        let target =
            ReconnectingHandle::new(Side::Target, self.target.clone(), to, retries.clone());
        Lane::new(shared.clone(), source, target, first)
    }
}
