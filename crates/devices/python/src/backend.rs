//! The scheme `python:`.

use std::sync::Arc;

use blockhaul_block::{Device, ThreadModel};
use blockhaul_catalog::{Backend, BackendTarget, Exports, HandleOpener, OpenFuture, OpenedDevice};

use crate::group::{GroupExports, PluginGroup};
use crate::host::PythonHost;
use crate::keeper::HostKeeper;
use crate::settings::PythonSettings;
use crate::visit::{PythonExports, PythonVisit};

/// The backend `python:SCRIPT`.
pub struct PythonBackend;

impl Backend for PythonBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["python"]
    }

    fn operand(&self) -> &'static str {
        "SCRIPT[?KEY=VALUE&…]"
    }

    fn summary(&self) -> &'static str {
        "a plugin in Python, with nbdkit's interface for Python or with coroutines (async def), in a process \
         of its own; parameters go to its config(key, value); @python=CMD: the interpreter, Python 3.9 or \
         later [default: python3]; @threads=N: maximum parallel callbacks, if the plugin allows parallel \
         requests [default: 16]; @processes=N: run the plugin in N processes, for callbacks that compute \
         [default: 1]; @timeout=TIME: fail a request after this time, and kill a plugin that does \
         not return in twice that time [default: never]"
    }

    fn example(&self) -> &'static str {
        r#"
cat > zeroes.py << 'END'
API_VERSION = 2
def open(readonly): return 1
def get_size(h): return 1 << 20
def pread(h, buf, offset, flags): buf[:] = bytes(len(buf))
END
blockhaul copy python:zeroes.py disk.raw
"#
    }

    fn raw(&self) -> bool {
        true
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            let shutdown = target.context.registry().shutdown.clone();
            let settings = PythonSettings::of(&target)?;
            if settings.host.processes > 1 {
                let group = PluginGroup::start(settings, shutdown).await?;
                return group.open(!target.intent.write).await;
            }
            let host = PythonHost::start(&settings, None, shutdown).await?;
            // If there may be only one connection at a time, a second would wait for ever.
            let several = host.model != ThreadModel::SerializeConnections;
            let more = PythonHandles { host, readonly: !target.intent.write };
            let device = more.another().await?;
            let more = several.then(|| Arc::new(more) as Arc<dyn HandleOpener>);
            Ok(OpenedDevice { device, more })
        })
    }

    fn exports(&self, target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        let target = target.clone();
        Some(Box::pin(async move {
            let shutdown = target.context.registry().shutdown.clone();
            let settings = PythonSettings::of(&target)?;
            let readonly = !target.intent.write;
            if settings.host.processes > 1 {
                let group = PluginGroup::start(settings, shutdown).await?;
                return Ok(Arc::new(GroupExports { group, readonly }) as Arc<dyn Exports>);
            }
            let keeper = HostKeeper::start(settings, shutdown).await?;
            Ok(Arc::new(PythonExports { keeper, readonly }) as Arc<dyn Exports>)
        }))
    }
}

/// Handles for this program's own use: each is a separate connection.
struct PythonHandles {
    host: Arc<PythonHost>,
    readonly: bool,
}

impl HandleOpener for PythonHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let host = self.host.clone();
        let readonly = self.readonly;
        Box::pin(async move {
            let visit = PythonVisit::enter(host, readonly, None).await?;
            Ok(visit.open_handle("", false).await?.1)
        })
    }
}
