//! Users and passwords of registries, in the files of skopeo, podman and docker (containers-auth.json(5)).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};
use serde_json::Value;

use super::reference::ImageReference;
use crate::files::read_text;

/// Largest file with credentials.
const FILE_MAX: u64 = 1 << 20;
/// The name of docker.io in files of docker.
const DOCKER: &str = "https://index.docker.io/v1/";

/// Credentials of a registry. They are in no message.
pub(super) enum RegistryLogin {
    /// A user and a password.
    Password(String, String),
    /// A token for tokens.
    Identity(String),
}

/// The credentials of an image in the files of this user, if there are any. Blocks.
///
/// # Errors
/// A file is damaged.
pub(super) fn find(image: &ImageReference) -> Result<Option<RegistryLogin>> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(file) = variable("REGISTRY_AUTH_FILE") {
        return of_file(Path::new(&file), image);
    }
    let home = variable("HOME").map(PathBuf::from);
    let runtime = match variable("XDG_RUNTIME_DIR") {
        Some(folder) => PathBuf::from(folder).join("containers"),
        None => format!("/run/containers/{}", rustix::process::getuid().as_raw()).into(),
    };
    let docker = variable("DOCKER_CONFIG").map(PathBuf::from);
    let docker = docker.or_else(|| home.as_ref().map(|home| home.join(".docker")));
    let files = [
        Some(runtime.join("auth.json")),
        home.as_ref().map(|home| home.join(".config/containers/auth.json")),
        docker.map(|folder| folder.join("config.json")),
    ];
    for file in files.into_iter().flatten().filter(|file| file.exists()) {
        if let Some(found) = of_file(&file, image)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn of_file(file: &Path, image: &ImageReference) -> Result<Option<RegistryLogin>> {
    let text = read_text(file, FILE_MAX)?;
    of_text(&text, image).map_err(|why| {
        let text = format!("{}: {why}", file.display());
        let remedy =
            "log in again (skopeo login, podman login), or give a user and password-file=FILE";
        Error::new(Kind::Invalid, text).with_remedy(remedy)
    })
}

/// The credentials of an image in the text of a file, or what is wrong with it.
fn of_text(text: &str, image: &ImageReference) -> Result<Option<RegistryLogin>, String> {
    // Texts of the parser could show secrets.
    let all: HashMap<String, Value> =
        serde_json::from_str(text).map_err(|_| "no JSON object".to_owned())?;
    let auths = all.get("auths").and_then(Value::as_object);
    let found = auths.and_then(|auths| keys(image).iter().find_map(|key| auths.get(key)));
    if let Some(found) = found {
        let member =
            |name: &str| found.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        if let Some(token) = member("identitytoken") {
            return Ok(Some(RegistryLogin::Identity(token.to_owned())));
        }
        if let Some(auth) = member("auth") {
            return password(auth)
                .map(Some)
                .ok_or_else(|| "an entry of auths is damaged".to_owned());
        }
    }
    let helpers = all.get("credHelpers").and_then(|helpers| helpers.get(&image.registry));
    if helpers.is_some() || found.is_some() && all.contains_key("credsStore") {
        return Err(format!(
            "the credentials of {} are with a helper program, which is not supported",
            image.registry
        ));
    }
    Ok(None)
}

/// The keys that an entry for an image may have, the longest first.
fn keys(image: &ImageReference) -> Vec<String> {
    let ImageReference { registry, name, .. } = image;
    let mut keys = Vec::new();
    let mut path = name.as_str();
    loop {
        keys.push(format!("{registry}/{path}"));
        let Some((shorter, _)) = path.rsplit_once('/') else { break };
        path = shorter;
    }
    let forms =
        [registry.clone(), format!("https://{registry}"), format!("https://{registry}/v2/")];
    keys.extend(forms);
    if registry == "docker.io" {
        keys.push(DOCKER.to_owned());
    }
    keys
}

fn password(auth: &str) -> Option<RegistryLogin> {
    let bytes = openssl::base64::decode_block(auth).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (user, password) = text.split_once(':')?;
    // Padding of some versions of docker.
    Some(RegistryLogin::Password(user.to_owned(), password.trim_end_matches('\0').to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    fn found(text: &str, image: &str) -> Result<Option<String>, String> {
        let login = of_text(text, &ImageReference::parse(image).unwrap())?;
        Ok(login.map(|login| match login {
            RegistryLogin::Password(user, password) => format!("{user}/{password}"),
            RegistryLogin::Identity(token) => token,
        }))
    }

    #[test]
    fn the_most_specific_entry_counts() {
        let text = r#"{"auths":{"h:5000":{"auth":"dTpw"},"h:5000/a":{"auth":"dTI6cHc6Mg=="},
            "https://index.docker.io/v1/":{"auth":"ZDpk"},"i":{"auth":"dTpw","identitytoken":"t"},"e":{}}}"#;
        for (image, expected) in [
            ("h:5000/b:1", Some("u/p")),
            ("h:5000/a/b", Some("u2/pw:2")),
            ("h:5000/a", Some("u2/pw:2")),
            ("h:5000/ab", Some("u/p")),
            ("docker.io/x", Some("d/d")),
            ("i/x", Some("t")),
            ("e/x", None),
            ("h/a", None),
        ] {
            assert_eq!(found(text, image).unwrap().as_deref(), expected, "{image}");
        }
    }

    #[test]
    fn damaged_files_and_helpers_are_errors_without_secrets() {
        for (text, why) in [
            ("{\"auths\":{\"h\":{\"auth\":\"secret!\"}}}", "damaged"),
            ("{\"auths\":{\"h\":{\"auth\":\"c2VjcmV0\"}}}", "damaged"),
            ("{\"auths\": secret", "no JSON"),
            ("{\"auths\":{\"h\":{}},\"credsStore\":\"pass\"}", "helper program"),
            ("{\"credHelpers\":{\"h\":\"pass\"}}", "helper program"),
        ] {
            let said = found(text, "h/a").unwrap_err();
            assert!(said.contains(why) && !said.contains("secret"), "{said}");
        }
        assert_eq!(found("{\"credsStore\":\"pass\"}", "h/a").unwrap(), None);
        assert_eq!(found("{}", "h/a").unwrap(), None);
    }
}
