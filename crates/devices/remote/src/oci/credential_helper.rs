//! Credential helpers of docker: programs `docker-credential-NAME` that keep users and passwords.

use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde_json::Value;

use super::credentials::RegistryLogin;

/// Time for the output of a helper: it may ask the user for a passphrase.
const LIMIT: Duration = Duration::from_secs(30);
/// Time for the end of a helper whose output has ended.
const END: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// Bytes that a helper prints.
const OUTPUT_MAX: u64 = 256 << 10;
/// The name of the user that says that the password is an identity token.
const TOKEN_USER: &str = "<token>";
/// The output of all helpers that have no credentials for a server.
const ABSENT: &str = "credentials not found in native keychain";

/// The credentials that the helper with this name has for a server; the error says what is wrong, without what the
/// helper has printed. Blocks.
pub(super) fn ask(name: &str, server: &str) -> Result<Option<RegistryLogin>, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || !name.chars().all(is_plain) {
        return Err("the name of the credential helper has characters that are not allowed".into());
    }
    let program = format!("docker-credential-{name}");
    run(Command::new(&program).arg("get"), server, LIMIT).map_err(|why| format!("{program} {why}"))
}

fn run(
    command: &mut Command,
    server: &str,
    limit: Duration,
) -> Result<Option<RegistryLogin>, String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    // A helper is ended together with what it has started.
    let mut child = command
        .process_group(0)
        .spawn()
        .map_err(|error| format!("cannot be run: {}", blockhaul_io::plain(&error)))?;
    // It may close its output before its end.
    let output = output(&mut child, server, limit)
        .and_then(|output| if has_ended(&child) { Ok(output) } else { Err("does not end".into()) });
    if output.is_err() {
        end(&child);
    }
    let status = child.wait().map_err(|error| format!("is lost: {}", blockhaul_io::plain(&error)));
    found(&output?, status?)
}

/// Whether a helper whose output has ended ends, too, in a moment.
fn has_ended(child: &Child) -> bool {
    let process = pid(child).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    let Some(Ok(process)) = process else { return false };
    let mut ends = [PollFd::new(&process, PollFlags::IN)];
    retry_on_intr(|| poll(&mut ends, Some(&END))).is_ok_and(|count| count == 1)
}

fn pid(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw)
}

fn late(limit: Duration) -> String {
    format!("has not ended within {} s", limit.as_secs_f32())
}

/// The output of a helper that gets the server.
fn output(child: &mut Child, server: &str, limit: Duration) -> Result<Vec<u8>, String> {
    let (input, printed) = (child.stdin.take(), child.stdout.take());
    let server = server.to_owned();
    let (done, ended) = mpsc::channel();
    let talk = move || {
        // A helper may end before it reads.
        let _ = input.map(|mut input| input.write_all(server.as_bytes()));
        let mut bytes = Vec::new();
        let read = printed.map(|printed| printed.take(OUTPUT_MAX + 1).read_to_end(&mut bytes));
        // Nobody may wait any more.
        let _ = done.send(read.transpose().map(|_| bytes));
    };
    let started = thread::Builder::new().name("credentials".to_owned()).spawn(talk);
    started.map_err(|error| format!("cannot be waited for: {}", blockhaul_io::plain(&error)))?;
    match ended.recv_timeout(limit) {
        Ok(Ok(bytes)) if bytes.len() as u64 > OUTPUT_MAX => {
            Err(format!("prints more than {OUTPUT_MAX} bytes"))
        }
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) => Err(format!("cannot be read: {}", blockhaul_io::plain(&error))),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Err(late(limit)),
    }
}

fn end(child: &Child) {
    // It may have ended.
    let _ = pid(child).map(|pid| kill_process_group(pid, Signal::KILL));
}

fn found(output: &[u8], status: ExitStatus) -> Result<Option<RegistryLogin>, String> {
    if !status.success() {
        let is_absent = output.trim_ascii() == ABSENT.as_bytes();
        return if is_absent { Ok(None) } else { Err(format!("failed ({status})")) };
    }
    // Texts of the parser could show secrets.
    let all: Value = serde_json::from_slice(output).unwrap_or_default();
    let member = |name: &str| all.get(name).and_then(Value::as_str).map(str::to_owned);
    match (member("Username"), member("Secret")) {
        (Some(user), Some(secret)) if user == TOKEN_USER => {
            Ok(Some(RegistryLogin::Identity(secret)))
        }
        (Some(user), Some(secret)) => Ok(Some(RegistryLogin::Password(user, secret))),
        _ => Err("prints no credentials".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_script(script: &str) -> Result<Option<String>, String> {
        let login = run(Command::new("sh").args(["-c", script]), "h:5000", Duration::from_secs(2))?;
        Ok(login.map(|login| match login {
            RegistryLogin::Password(user, password) => format!("{user}/{password}"),
            RegistryLogin::Identity(token) => token,
        }))
    }

    #[test]
    fn helpers_get_the_server_and_print_credentials() {
        let script = r#"printf '{"Username":"u","Secret":"p of %s"}' "$(cat)""#;
        assert_eq!(of_script(script).unwrap().as_deref(), Some("u/p of h:5000"));
        let token = r#"echo '{"ServerURL":"h","Username":"<token>","Secret":"t"}'"#;
        assert_eq!(of_script(token).unwrap().as_deref(), Some("t"));
        assert_eq!(of_script("echo credentials not found in native keychain; exit 1"), Ok(None));
    }

    #[test]
    fn bad_helpers_are_errors_without_their_output() {
        for (script, why) in [
            ("echo secret; exit 1", "failed (exit status: 1)"),
            ("echo secret", "prints no credentials"),
            ("echo '{\"Username\":\"u\"}'", "prints no credentials"),
            ("exec yes secret", "prints more than 262144 bytes"),
            ("sleep 60 & sleep 60", "within 2 s"),
            ("exec >&-; sleep 60", "does not end"),
        ] {
            let said = of_script(script).unwrap_err();
            assert!(said.contains(why) && !said.contains("secret"), "{said}");
        }
        for name in ["", "a/b", "../x", "a b"] {
            assert!(ask(name, "h").is_err_and(|said| said.contains("not allowed")), "{name}");
        }
        let absent = ask("blockhaul-test-absent", "h");
        assert!(absent.is_err_and(|said| said.contains("cannot be run")));
    }
}
