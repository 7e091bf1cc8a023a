//! The schemes `sh:` and `eval:`.

use std::sync::Arc;

use blockhaul_block::{Device, ThreadModel};
use blockhaul_catalog::{Backend, BackendTarget, Exports, HandleOpener, OpenFuture, OpenedDevice};

use crate::plugin::ScriptPlugin;
use crate::settings::ScriptSettings;
use crate::source::Language;
use crate::visit::{ScriptExports, ScriptVisit};

/// The backend `sh:SCRIPT`.
pub struct ShBackend;

impl Backend for ShBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["sh"]
    }

    fn operand(&self) -> &'static str {
        "SCRIPT[?KEY=VALUE&…]"
    }

    fn summary(&self) -> &'static str {
        "a script or program in nbdkit's protocol for scripts, started for each request, with its own \
         parameters; - reads the script from standard input; @threads=N: maximum parallel runs, if the \
         script allows parallel requests [default: 16]; @timeout=TIME: kill a run after this time [default: \
         never]"
    }

    fn example(&self) -> &'static str {
        r#"
printf 'case $1 in get_size) echo 1M;; pread) head -c $3 /dev/zero;; *) exit 2; esac' > d.sh
chmod +x d.sh
blockhaul copy 'sh:./d.sh' disk.raw
"#
    }

    fn raw(&self) -> bool {
        true
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        open(Language::Sh, target)
    }

    fn exports(&self, target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        Some(exports(Language::Sh, target.clone()))
    }
}

/// The backend `eval:METHOD=SCRIPT&…`.
pub struct EvalBackend;

impl Backend for EvalBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["eval"]
    }

    fn operand(&self) -> &'static str {
        "METHOD=COMMANDS&…"
    }

    fn summary(&self) -> &'static str {
        "the same protocol, with shell commands for each method as parameters: get_size=…, pread=…; write \
         %26 for & and %25 for %; other keys are passed to config=…; @threads=N, @timeout=TIME as for sh:"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy 'eval:get_size=echo 1M&pread=head -c $3 /dev/zero' disk.raw
"#
    }

    fn raw(&self) -> bool {
        true
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        open(Language::Eval, target)
    }

    fn exports(&self, target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        Some(exports(Language::Eval, target.clone()))
    }
}

fn open(language: Language, target: BackendTarget) -> OpenFuture<OpenedDevice> {
    Box::pin(async move {
        let readonly = !target.intent.write;
        let plugin = ScriptPlugin::start(
            ScriptSettings::parse(language, &target)?,
            target.context.registry().shutdown.clone(),
        )
        .await?;
        let more = ScriptHandles { plugin, readonly };
        let device = more.another().await?;
        // If there may be only one connection at a time, a second would wait for ever.
        let several = more.plugin.model != ThreadModel::SerializeConnections;
        let more = several.then(|| Arc::new(more) as Arc<dyn HandleOpener>);
        Ok(OpenedDevice { device, more })
    })
}

fn exports(language: Language, target: BackendTarget) -> OpenFuture<Arc<dyn Exports>> {
    Box::pin(async move {
        let readonly = !target.intent.write;
        let plugin = ScriptPlugin::start(
            ScriptSettings::parse(language, &target)?,
            target.context.registry().shutdown.clone(),
        )
        .await?;
        Ok(Arc::new(ScriptExports { plugin, readonly }) as Arc<dyn Exports>)
    })
}

/// Handles for this program's own use: each is a separate connection.
struct ScriptHandles {
    plugin: Arc<ScriptPlugin>,
    readonly: bool,
}

impl HandleOpener for ScriptHandles {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let plugin = self.plugin.clone();
        let readonly = self.readonly;
        Box::pin(async move {
            let visit = ScriptVisit::enter(plugin, readonly, None).await?;
            visit.open_handle("", false).await
        })
    }
}
