//! An open handle of a plugin. All of this runs on the threads of the handle's lane: [`facts`]
//! makes the queries, [`calls`] the requests.

mod calls;
mod facts;

use std::ffi::{CString, c_int};
use std::sync::{Arc, OnceLock};

use blockhaul_block::{Error, Facts, Kind, Result};

use crate::abi;
use crate::connection::PluginConnection;
use crate::context::{self, CallContext};
use crate::plugin::Plugin;

pub(crate) use self::calls::{RANGE_MAX, aligned};

/// Maximum read or write passed to plugins: nbdkit's limit, which plugins may rely on.
const TRANSFER_MAX: u32 = 64 << 20;
/// An open handle. Closed, on its lane, when dropped.
pub(crate) struct PluginHandle {
    pub(crate) connection: Arc<PluginConnection>,
    pub(crate) context: Arc<CallContext>,
    pub(crate) pointer: HandlePointer,
    pub(crate) facts: Arc<Facts>,
    /// Whether `zero` may be called at all.
    native_zero: bool,
    fua: c_int,
    cache: c_int,
    /// Maximum read or write passed to the plugin.
    longest: u32,
    /// The `conn` of an asynchronous plugin.
    pub(crate) token: OnceLock<HandleToken>,
}

/// A number for a handle, and the function that removes it when the handle is closed.
pub(crate) struct HandleToken {
    pub(crate) number: u64,
    pub(crate) forget: fn(u64),
}

/// The result of `open`: a token for the plugin.
#[derive(Clone, Copy)]
pub(crate) struct HandlePointer(pub(crate) abi::RawHandle);

// SAFETY: never dereferenced here; the plugin gets it back according to its thread model.
unsafe impl Send for HandlePointer {}
// SAFETY: as above.
unsafe impl Sync for HandlePointer {}

impl PluginHandle {
    /// Opens a handle and makes all queries once.
    pub(crate) fn open(
        connection: Arc<PluginConnection>,
        name: CString,
        tls: bool,
    ) -> Result<Arc<PluginHandle>> {
        let plugin = &connection.plugin;
        let shown = if name.is_empty() {
            format!("nbdkit:{}", plugin.name)
        } else {
            format!("nbdkit:{}/{}", plugin.name, name.to_string_lossy())
        };
        let context = Arc::new(connection.context(Some(name), tls));
        let open = plugin.abi.open.expect("checked when it was loaded");
        let readonly = c_int::from(connection.readonly);
        // SAFETY: the callback takes a number, on the connection's lane.
        let (pointer, left) = context::call(&context, c"open", || unsafe { open(readonly) });
        if pointer.is_null() {
            return Err(if left.text.is_empty() {
                let text = format!("plugin {}: open answered NULL and gave no reason", plugin.name);
                Error::new(Kind::Io, text).complete()
            } else {
                plugin.error("open", &left)
            });
        }
        let mut handle = PluginHandle {
            context,
            pointer: HandlePointer(pointer),
            facts: Arc::new(Facts::new(shown, 0)),
            native_zero: false,
            fua: abi::FUA_NONE,
            cache: 0,
            longest: TRANSFER_MAX,
            token: OnceLock::new(),
            connection: connection.clone(),
        };
        // A failure from here on drops the handle, which closes it.
        handle.ask_all()?;
        Ok(Arc::new(handle))
    }

    /// Whether the plugin itself implements FUA.
    pub(crate) fn has_native_fua(&self) -> bool {
        self.fua == abi::FUA_NATIVE
    }

    fn plugin(&self) -> &Plugin {
        &self.connection.plugin
    }
}

impl Drop for PluginHandle {
    fn drop(&mut self) {
        if let Some(token) = self.token.get() {
            (token.forget)(token.number);
        }
        let Some(close) = self.connection.plugin.abi.close else { return };
        let pointer = self.pointer;
        let context = self.context.clone();
        let connection = self.connection.clone();
        self.connection.lane.run(move || {
            let pointer = pointer;
            // SAFETY: the last use of an open handle, on its lane: every request held the handle.
            let ((), left) = context::call(&context, c"close", || unsafe { close(pointer.0) });
            connection.plugin.log_rest(&left, 0);
            drop((context, connection));
        });
    }
}
