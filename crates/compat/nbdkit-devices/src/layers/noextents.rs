//! `noextents`: reports all of the device as data.

use blockhaul_block::Can;
use blockhaul_catalog::{LayerKind, Param};

use blockhaul_layers::support::layer;
use blockhaul_layers::support::masked;

/// The layer `noextents`.
pub static NOEXTENTS: LayerKind = LayerKind {
    name: "noextents",
    summary: "hides extents: everything counts as data",
    manual: "For clients that are confused by holes, for sources whose extents are slow to find out \
or wrong, and to measure what extents gain. `base:allocation` can still be asked for and says that all \
is data; other contexts are hidden.",
    example: r#"
blockhaul serve --layer noextents sample:64M --run 'blockhaul map "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: NONE,
    changeable: &[],
    configure: |_| {
        layer(|inner| {
            Ok(masked(inner, |facts| {
                facts.can -= Can::EXTENTS;
                facts.contexts.clear();
            }))
        })
    },
};

const NONE: &[Param] = &[];
