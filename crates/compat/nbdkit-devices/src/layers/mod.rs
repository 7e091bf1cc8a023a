//! Layers that nbdkit has as filters.

mod checkwrite;
mod delay;
mod error;
mod evil;
mod extentlist;
mod fua;
mod hint;
mod multi_conn;
mod nocache;
mod noextents;
mod nozero;
mod protect;
mod ranges;
mod readahead;
mod rotational;
mod scan;
mod swab;
mod truncate;

use blockhaul_catalog::LayerKind;

/// Every layer of this crate, for a [`blockhaul_catalog::Registry`], by name.
pub fn all() -> Vec<&'static LayerKind> {
    vec![
        &checkwrite::CHECKWRITE,
        &delay::DELAY,
        &error::ERROR,
        &evil::EVIL,
        &extentlist::EXTENTLIST,
        &fua::FUA,
        &multi_conn::MULTI_CONN,
        &nocache::NOCACHE,
        &noextents::NOEXTENTS,
        &nozero::NOZERO,
        &protect::PROTECT,
        &readahead::READAHEAD,
        &rotational::ROTATIONAL,
        &scan::SCAN,
        &swab::SWAB,
        &truncate::TRUNCATE,
    ]
}
