//! `offset`: shows a part of the device.

use std::sync::Arc;

use blockhaul_block::{
    BlockSizes, Device, Error, Facts, FileRange, Hints, Kind, LeaseAccess, Op, PendingRequest,
    Request, Result, emulate,
};
use blockhaul_catalog::{Layer, LayerKind, Param, ParamKind, ParamValues};

use crate::masked::masked;

/// The layer `offset`.
pub static OFFSET: LayerKind = LayerKind {
    name: "offset",
    summary: "serves a part of the device, for example a partition",
    manual: "Offset 0 for clients is `offset` on the device, and the part ends after `range` bytes. A part \
that exceeds the device is refused when it is opened. `partition` finds the place of a \
partition.",
    example: r#"
blockhaul copy --source-layer 'offset?offset=1M&range=32M' sample:64M part.raw
"#,
    needs_content: true,
    writes_below: true,
    transparent: false,
    params: &[
        Param {
            name: "offset",
            kind: ParamKind::Size,
            default: Some("0"),
            doc: "Offset of the part.",
        },
        Param {
            name: "range",
            kind: ParamKind::Size,
            default: None,
            doc: "Length of the part [default: up to the end of the device].",
        },
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let offset = args.size("offset").unwrap_or(0);
    Ok(Arc::new(OffsetWindow { offset, range: args.size("range") }))
}

/// A part of a device: its start, and its length or the rest of the device.
pub(crate) struct OffsetWindow {
    pub(crate) offset: u64,
    pub(crate) range: Option<u64>,
}

impl Layer for OffsetWindow {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let inner = self.over_whole_blocks(inner);
        let below = inner.facts();
        // Requests get another offset, and no other change.
        let kept = Hints::ZEROED
            | Hints::TAKES_PARKED
            | Hints::CLAIMS_ROOM
            | Hints::FLUSH_FAILURES_STAY
            | Hints::IN_FLIGHT
            | Hints::EXTENTS;
        let mut facts = Facts::over(&below).keeping(&below, kept);
        let Some(left) = facts.size.checked_sub(self.offset) else {
            let text = format!(
                "offset: {} is beyond the end of {}, which has {} bytes",
                self.offset, facts.name, facts.size
            );
            return Err(Error::new(Kind::Usage, text));
        };
        let size = self.range.unwrap_or(left);
        if size > left {
            let text = format!(
                "offset: range={size} from {} on exceeds the {} bytes of {}",
                self.offset, facts.size, facts.name
            );
            return Err(Error::new(Kind::Usage, text));
        }
        let minimum = facts.block.minimum;
        if !self.offset.is_multiple_of(u64::from(minimum)) {
            let text = format!(
                "offset: {} is not a multiple of {minimum} bytes, the minimum block size of {}",
                self.offset, facts.name
            );
            return Err(Error::new(Kind::Usage, text));
        }
        facts.size = size;
        // Requests aligned here must be aligned below; never stricter than the offset allows.
        let offset_align = match self.offset {
            0 => u32::MAX,
            offset => 1_u32.checked_shl(offset.trailing_zeros()).unwrap_or(u32::MAX),
        };
        facts.allocation_unit = facts.allocation_unit.min(offset_align);
        Ok(Arc::new(OffsetDevice { inner, facts: Arc::new(facts), offset: self.offset }))
    }
}

impl OffsetWindow {
    /// The device with the emulation of partial blocks, if the part ends within one. That includes
    /// blocks that are only advertised: no server can advertise them for this part.
    fn over_whole_blocks(&self, inner: Arc<dyn Device>) -> Arc<dyn Device> {
        let below = inner.facts();
        let minimum = below.block.minimum.max(below.advertised_or_own().minimum).max(1);
        let end = self.range.map_or(below.size, |range| self.offset.saturating_add(range));
        if end.is_multiple_of(u64::from(minimum)) || end >= below.size {
            return inner;
        }
        let maximum = below.block.maximum.max(minimum);
        emulate::emulate(masked(inner, |facts| {
            facts.block = BlockSizes { minimum, maximum, ..facts.block };
        }))
    }
}

struct OffsetDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    offset: u64,
}

impl Device for OffsetDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        if !matches!(request.op, Op::Flush) {
            // The fence has checked the range against a size that fits below.
            request.at = request.at.saturating_add(self.offset);
        }
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        let len = len.min(self.facts.size.checked_sub(at)?);
        self.inner.file_at(at.checked_add(self.offset)?, len, access)
    }
}
