//! `noextents`: reports all of the device as data.

use blockhaul_block::Can;
use blockhaul_catalog::{LayerKind, Param};

use blockhaul_layers::support::layer;
use blockhaul_layers::support::masked;

/// The layer `noextents`.
pub static NOEXTENTS: LayerKind = LayerKind {
    name: "noextents",
    summary: "hides extents: everything counts as data",
    manual: "For clients that do not handle holes, for sources whose extents are slow to query or wrong, \
and to measure the benefit of extents. `base:allocation` is still available and reports \
everything as data; other contexts are hidden.",
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
