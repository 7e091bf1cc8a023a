//! Members of log records besides the text: the client and the request, for programs that parse the
//! log.

use blockhaul_wire::request::{CommandCode, RequestHeader};

use crate::counters;

/// Logs a record about a [`crate::connection::Connection`], with its number, the client's address
/// and identity, and the export as members; others may follow the connection.
macro_rules! record {
    ($level:ident, $connection:expr; $($text:tt)+) => {
        log::log!(
            log::Level::$level,
            connection = $connection.id,
            client = $connection.peer,
            user = $connection.user(),
            export = $connection.export();
            $($text)+
        )
    };
    ($level:ident, $connection:expr, $($key:ident $(= $value:expr)?),+; $($text:tt)+) => {
        log::log!(
            log::Level::$level,
            connection = $connection.id,
            client = $connection.peer,
            user = $connection.user(),
            export = $connection.export(),
            $($key $(= $value)?),+;
            $($text)+
        )
    };
}
pub(crate) use record;

/// A request, as members of a record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RequestFields {
    /// Its kind, by the name used in error messages.
    pub(crate) request: &'static str,
    /// In bytes; none if meaningless.
    pub(crate) offset: Option<u64>,
    /// In bytes; none if meaningless.
    pub(crate) length: Option<u64>,
}

impl RequestFields {
    pub(crate) fn of(header: &RequestHeader) -> RequestFields {
        let request = counters::kind(header.command).map_or("unknown", |kind| kind.name());
        let ranged = header.command != CommandCode::Flush;
        let offset = ranged.then_some(header.offset);
        let length = ranged.then_some(header.length);
        RequestFields { request, offset, length }
    }
}
