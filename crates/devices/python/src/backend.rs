//! The scheme `python:`.

use std::sync::Arc;

use blockhaul_block::{Device, ThreadModel};
use blockhaul_catalog::{Another, Backend, Exports, Opened, Opening, Target};

use crate::group::{Group, GroupExports};
use crate::host::Host;
use crate::keeper::Keeper;
use crate::settings::Settings;
use crate::visit::{PythonExports, PythonVisit};

/// The backend `python:SCRIPT`.
pub struct Python;

impl Backend for Python {
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

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move {
            let shutdown = target.context.registry().shutdown.clone();
            let settings = Settings::of(&target)?;
            if settings.host.processes > 1 {
                let group = Group::start(settings, shutdown).await?;
                return group.open(!target.intent.write).await;
            }
            let host = Host::start(&settings, None, shutdown).await?;
            // If there may be only one connection at a time, a second would wait for ever.
            let several = host.model != ThreadModel::SerializeConnections;
            let more = Handles { host, readonly: !target.intent.write };
            let device = more.another().await?;
            let more = several.then(|| Arc::new(more) as Arc<dyn Another>);
            Ok(Opened { device, more })
        })
    }

    fn exports(&self, target: &Target) -> Option<Opening<Arc<dyn Exports>>> {
        let target = target.clone();
        Some(Box::pin(async move {
            let shutdown = target.context.registry().shutdown.clone();
            let settings = Settings::of(&target)?;
            let readonly = !target.intent.write;
            if settings.host.processes > 1 {
                let group = Group::start(settings, shutdown).await?;
                return Ok(Arc::new(GroupExports { group, readonly }) as Arc<dyn Exports>);
            }
            let keeper = Keeper::start(settings, shutdown).await?;
            Ok(Arc::new(PythonExports { keeper, readonly }) as Arc<dyn Exports>)
        }))
    }
}

/// Handles for this program's own use: each is a separate connection.
struct Handles {
    host: Arc<Host>,
    readonly: bool,
}

impl Another for Handles {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let host = self.host.clone();
        let readonly = self.readonly;
        Box::pin(async move {
            let visit = PythonVisit::enter(host, readonly, None).await?;
            Ok(visit.open_handle("", false).await?.1)
        })
    }
}
