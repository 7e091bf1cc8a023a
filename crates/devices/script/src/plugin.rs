//! A script's life: load, configuration, readiness, and the end; in nbdkit's order, on one thread.

use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result, ThreadModel};
use blockhaul_catalog::{ExportClient, Shutdown};
use blockhaul_io::{BlockingPool, FifoLock};

use crate::answer::{self, ExitRequest, MethodResult};
use crate::call::{self, OutputTarget, Runner};
use crate::folder::StateFolder;
use crate::parse;
use crate::settings::ScriptSettings;
use crate::source::{Language, Script, ScriptSource};

/// Parses the output of a script; an unknown value becomes the safest.
fn thread_model(text: &str) -> ThreadModel {
    let name = text.to_ascii_lowercase().replace('-', "_");
    ThreadModel::from_name(&name).unwrap_or(ThreadModel::SerializeAllRequests)
}

/// A script that is ready. It ends when this and everything opened from it are dropped.
pub(crate) struct ScriptPlugin {
    source: ScriptSource,
    runner: Runner,
    pub(crate) model: ThreadModel,
    /// The thread of the script's life, and of all runs if only one may run at a time.
    pub(crate) control: Arc<BlockingPool>,
    /// Threads for scripts that may run in parallel.
    pub(crate) pool: Arc<BlockingPool>,
    /// The lock for scripts with one connection at a time.
    pub(crate) one_by_one: Arc<FifoLock>,
    /// Taken when the plugin ends.
    folder: Option<StateFolder>,
    /// Stops the server that the script was opened for.
    shutdown: Shutdown,
}

impl ScriptPlugin {
    /// Configures a script and makes it ready.
    pub(crate) async fn start(
        settings: ScriptSettings,
        shutdown: Shutdown,
    ) -> Result<Arc<ScriptPlugin>> {
        let control = Arc::new(BlockingPool::single(settings.language.name()));
        let (completer, ticket) = blockhaul_io::ticket();
        let own = control.clone();
        control.run(move || {
            let started =
                ScriptPlugin::begin(&settings, own, shutdown).and_then(ScriptPlugin::make_ready);
            completer.complete(started.map(Arc::new));
        });
        ticket.await.map_err(no_thread)?
    }

    /// Everything up to the last parameter.
    fn begin(
        settings: &ScriptSettings,
        control: Arc<BlockingPool>,
        shutdown: Shutdown,
    ) -> Result<ScriptPlugin> {
        let folder = StateFolder::new()?;
        let runner = Runner::new(folder.path(), settings.host.timeout);
        let pool = Arc::new(BlockingPool::parallel(
            format!("{}-pool", settings.language.name()),
            settings.host.threads,
        ));
        let mut config = settings.config.iter().enumerate();
        let source = match settings.language {
            Language::Eval => ScriptSource::eval(),
            Language::Sh => match config.next() {
                Some((_, (Some(key), value))) if key == "script" => {
                    ScriptSource::sh(value, &folder)?
                }
                Some((_, (None, value))) => ScriptSource::sh(value, &folder)?,
                _ => {
                    let text = "sh: name the script first, for example sh:/path/to/script";
                    return Err(Error::new(Kind::Usage, text));
                }
            },
        };
        live(1);
        let mut plugin = ScriptPlugin {
            source,
            runner,
            model: ThreadModel::SerializeAllRequests,
            control,
            pool,
            one_by_one: Arc::default(),
            folder: Some(folder),
            shutdown,
        };
        let mut magic = None;
        if settings.language == Language::Sh {
            plugin.step("load", &[])?;
            if let (MethodResult::Done, printed) = plugin.words("magic_config_key", &[], None)? {
                magic = Some(String::from_utf8_lossy(parse::line(&printed)).into_owned());
            }
        }
        for (index, (key, value)) in config {
            plugin.configure(index, key.as_deref(), value, magic.as_deref())?;
        }
        Ok(plugin)
    }

    fn configure(
        &mut self,
        index: usize,
        key: Option<&str>,
        value: &str,
        magic: Option<&str>,
    ) -> Result<()> {
        let shown = self.source.shown();
        let wrong = |text: String| Err(Error::new(Kind::Usage, format!("{shown}: {text}")));
        let key = match (key, magic, &self.source) {
            // As nbdkit: a bare value has the key `script`, which the script may change.
            (None | Some("script"), Some(magic), ScriptSource::Sh { .. }) => magic,
            (None | Some("script"), None, ScriptSource::Sh { .. }) => {
                return wrong(format!("{value:?}: write it as KEY=VALUE"));
            }
            (Some(key), ..) => key,
            (None, ..) if index == 0 => "script",
            (None, ..) => return wrong(format!("{value:?}: write it as KEY=VALUE")),
        };
        let mut letters = key.bytes();
        let fine = letters.next().is_some_and(|byte| byte.is_ascii_alphabetic())
            && letters.all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        if !fine {
            return wrong(format!("{key:?} is no name for a parameter"));
        }
        if matches!(self.source, ScriptSource::Eval { .. }) && ScriptSource::is_method(key) {
            return match &self.folder {
                Some(folder) => self.source.add(key, value, folder),
                None => Ok(()),
            };
        }
        match self.step("config", &[key.into(), value.into()])? {
            MethodResult::Missing if matches!(self.source, ScriptSource::Eval { .. }) => {
                wrong(format!("{key} is no method, and there is no config= to take it"))
            }
            MethodResult::Missing => wrong(format!("it takes no parameters, but {key}= is given")),
            _ => Ok(()),
        }
    }

    fn make_ready(mut self) -> Result<ScriptPlugin> {
        self.source.complete()?;
        self.step("config_complete", &[])?;
        self.settle_model()?;
        self.step("get_ready", &[])?;
        self.step("after_fork", &[])?;
        log::debug!("{} is ready, {}", self.source.shown(), self.model.name());
        Ok(self)
    }

    fn settle_model(&mut self) -> Result<()> {
        if let (MethodResult::Done, printed) = self.words("thread_model", &[], None)? {
            self.model = thread_model(&String::from_utf8_lossy(parse::line(&printed)));
        }
        Ok(())
    }

    /// Calls a method of the script's life, which succeeds or is missing.
    fn step(&self, method: &'static str, args: &[OsString]) -> Result<MethodResult> {
        let usage = |error: Error| Error::new(Kind::Usage, error.text().to_string());
        self.call(method, args, &[], None).map_err(usage)
    }

    /// The name for messages.
    pub(crate) fn shown(&self) -> String {
        self.source.shown()
    }

    /// The script of a method, for messages.
    pub(crate) fn script_of(&self, method: &str) -> String {
        match self.source.script(method) {
            Script::File(path) => path.display().to_string(),
            _ => self.shown(),
        }
    }

    /// Calls a method that succeeds or is missing; its output is ignored.
    pub(crate) fn call(
        &self,
        method: &'static str,
        args: &[OsString],
        input: &[u8],
        client: Option<&ExportClient>,
    ) -> Result<MethodResult> {
        let ended = self.run(method, args, input, OutputTarget::Text(&mut Vec::new()), client)?.0;
        self.not_no(method, ended)
    }

    /// Calls a method that prints words.
    pub(crate) fn words(
        &self,
        method: &'static str,
        args: &[OsString],
        client: Option<&ExportClient>,
    ) -> Result<(MethodResult, Vec<u8>)> {
        let mut printed = Vec::new();
        let ended = self.run(method, args, &[], OutputTarget::Text(&mut printed), client)?.0;
        Ok((self.not_no(method, ended)?, printed))
    }

    /// Calls a method that returns yes or no; `None` if it is missing.
    pub(crate) fn ask(
        &self,
        method: &'static str,
        args: &[OsString],
        client: Option<&ExportClient>,
    ) -> Result<Option<bool>> {
        let output = OutputTarget::Text(&mut Vec::new());
        Ok(match self.run(method, args, &[], output, client)?.0 {
            MethodResult::Done => Some(true),
            MethodResult::No => Some(false),
            MethodResult::Missing => None,
        })
    }

    /// Calls a method that fills memory; returns the number of bytes printed.
    pub(crate) fn fill(
        &self,
        method: &'static str,
        args: &[OsString],
        bytes: &mut [u8],
        client: Option<&ExportClient>,
    ) -> Result<(MethodResult, u64)> {
        let (ended, printed) = self.run(method, args, &[], OutputTarget::Bytes(bytes), client)?;
        Ok((self.not_no(method, ended)?, printed))
    }

    fn not_no(&self, method: &str, ended: MethodResult) -> Result<MethodResult> {
        if ended != MethodResult::No {
            return Ok(ended);
        }
        let script = self.script_of(method);
        let text = format!("{script}: {method} method returned unexpected code (3/false)");
        Err(Error::new(Kind::Io, text).complete())
    }

    fn run(
        &self,
        method: &'static str,
        args: &[OsString],
        input: &[u8],
        output: OutputTarget<'_>,
        client: Option<&ExportClient>,
    ) -> Result<(MethodResult, u64)> {
        let path = match self.source.script(method) {
            Script::Missing => return Ok((MethodResult::Missing, 0)),
            Script::Says(words) => {
                if let OutputTarget::Text(text) = output {
                    text.extend_from_slice(words.as_bytes());
                }
                return Ok((MethodResult::Done, words.len() as u64));
            }
            Script::File(path) => path,
        };
        let mut words = vec![OsString::from(method)];
        words.extend_from_slice(args);
        let run = self.runner.run(&path, &words, input, output);
        let run = run.map_err(|broken| answer::broken(&path, method, broken))?;
        let (ended, wish) = answer::meaning(&path, &run);
        if let Some(wish) = wish {
            self.grant(wish, &path, client);
        }
        Ok((ended?, run.printed))
    }

    fn grant(&self, wish: ExitRequest, script: &Path, client: Option<&ExportClient>) {
        log::debug!("{} asks to {wish}", script.display());
        let stream = client.and_then(|client| client.stream.as_ref());
        match (wish, stream) {
            (ExitRequest::Shutdown, _) => {
                self.shutdown.request(&format!("{} asks for it", script.display()));
            }
            (ExitRequest::Disconnect, Some(stream)) => stream.shutdown(),
            (ExitRequest::Leave, Some(stream)) => stream.shutdown_receive(),
            (_, None) => {}
        }
    }
}

impl Drop for ScriptPlugin {
    fn drop(&mut self) {
        let folder = self.folder.take();
        let runner = Runner::new(&self.runner.folder, self.runner.timeout);
        let script = self.source.script("unload");
        self.control.run(move || {
            if let Script::File(path) = script {
                // The last run; an error has no receiver any more.
                let output = OutputTarget::Text(&mut Vec::new());
                match runner.run(&path, &["unload".into()], &[], output) {
                    Ok(run) => log::debug!("{} has unloaded: {}", path.display(), run.status),
                    // A failed start was already reported at load.
                    Err(broken @ call::RunError::System(_)) => {
                        log::debug!("{}", answer::broken(&path, "unload", broken));
                    }
                    Err(broken) => log::warn!("{}", answer::broken(&path, "unload", broken)),
                }
            }
            drop(folder);
            live(-1);
        });
    }
}

/// Number of scripts in use.
static LIVE: (Mutex<i64>, Condvar) = (Mutex::new(0), Condvar::new());

fn live(change: i64) {
    *LIVE.0.lock().expect("no panic under this lock") += change;
    LIVE.1.notify_all();
}

/// Waits until every script has ended, at most this long, then kills the running ones. Returns
/// whether all have ended by themselves. Call it before the process ends, not on a worker.
pub fn wait_for_end(limit: Duration) -> bool {
    let deadline = blockhaul_io::now() + limit;
    let mut live = LIVE.0.lock().expect("no panic under this lock");
    while *live > 0 {
        let left = deadline.saturating_duration_since(blockhaul_io::now());
        if left.is_zero() {
            break;
        }
        live = LIVE.1.wait_timeout(live, left).expect("no panic under this lock").0;
    }
    let ended = *live == 0;
    drop(live);
    call::kill_all();
    ended
}

/// The description of a script, without starting it: lines of `key=value`, as printed by `nbdkit
/// --dump-plugin`.
///
/// # Errors
/// If the script does not exist, or the thread for it cannot be started.
pub fn dump(settings: &ScriptSettings) -> Result<String> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let control = Arc::new(BlockingPool::single(settings.language.name()));
    let own = control.clone();
    let settings = settings.clone();
    control.run(move || {
        // The caller waits below.
        let _ = sender.send(dump_here(&settings, own));
    });
    drop(control);
    receiver.recv().map_err(no_thread)?
}

fn dump_here(settings: &ScriptSettings, control: Arc<BlockingPool>) -> Result<String> {
    let name = settings.language.name();
    let bare = settings.language == Language::Sh && settings.config.is_empty();
    let plugin = if bare {
        None
    } else {
        Some(ScriptPlugin::begin(settings, control, Shutdown::default())?)
    };
    let model = match plugin {
        // Without a script there is nothing that would mind.
        None => (ThreadModel::Parallel, None),
        Some(mut plugin) => {
            plugin.settle_model()?;
            (plugin.model, Some(plugin))
        }
    };
    let (model, plugin) = model;
    let mut text = format!(
        "name={name}\nversion={}\napi_version=2\nmax_thread_model=parallel\nthread_model={}\n\
         errno_is_preserved=1\n",
        env!("CARGO_PKG_VERSION"),
        model.name()
    );
    if settings.language == Language::Sh {
        text += "magic_config_key=script\n";
    }
    text += &format!("max_known_status={}\n", answer::KNOWN_STATUS_MAX);
    if let Some(plugin) = plugin
        && let Ok((MethodResult::Done, printed)) = plugin.words("dump_plugin", &[], None)
    {
        text += &String::from_utf8_lossy(&printed);
    }
    Ok(text)
}

/// No thread could be started for a script.
pub(crate) fn no_thread(lost: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(Kind::Io, "cannot start a thread for a script").complete().because(lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_models_are_understood_in_both_spellings() {
        for number in 0..4 {
            let model = ThreadModel::from_number(number).unwrap();
            assert_eq!(thread_model(model.name()), model);
            assert_eq!(thread_model(&model.name().replace('_', "-")), model);
        }
        assert_eq!(thread_model("PARALLEL"), ThreadModel::Parallel);
        assert_eq!(thread_model("other"), ThreadModel::SerializeAllRequests);
    }
}
