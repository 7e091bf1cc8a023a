//! Gates: decide which clients are admitted, what they may open, and when the server ends.
//!
//! They see no requests. Their position among layers does not matter, but their order does: the
//! last one sees a client first. `rule` has what they have in common.

mod exitlast;
mod exitwhen;
mod exportname;
mod ip;
mod limit;
mod rule;
mod tls_fallback;

use blockhaul_catalog::GateKind;

/// Every gate, for a [`blockhaul_catalog::Registry`], by name.
pub fn all() -> Vec<&'static GateKind> {
    vec![
        &exitlast::EXITLAST,
        &exitwhen::EXITWHEN,
        &exportname::EXPORTNAME,
        &ip::IP,
        &limit::LIMIT,
        &tls_fallback::TLS_FALLBACK,
    ]
}
