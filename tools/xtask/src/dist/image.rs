//! The container image: an OCI layout in a tar file, with the static program and nothing else.
//!
//! It is put together here, because that needs neither root nor a daemon nor a registry. `Containerfile`
//! builds the same image from source.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::build::{self, Flavour};
use super::piece::{DistRun, PackageOutput, size_of, write};
use super::{files, licenses, sums};
use crate::{TaskResult, run};

/// User and group of the program in the container.
pub const USER: u32 = 65532;

pub fn make(dist: &DistRun) -> Result<PackageOutput, String> {
    let program = build::program(Flavour::Static)?;
    let top = dist.empty("image")?;
    let root = top.join("root");
    let oci = top.join("oci");
    lay_out(&program.path, &root)?;
    let blobs = oci.join("blobs/sha256");
    fs::create_dir_all(&blobs)
        .map_err(|error| format!("cannot make {}: {error}", blobs.display()))?;
    let plain = top.join("layer.tar");
    run::quiet(dist.tar(&plain, &root).arg("."))?;
    let content = sums::of(&plain)?;
    run::quiet(dist.command("gzip").args(["-9", "-n"]).arg(&plain))?;
    let layer = keep(&plain.with_extension("tar.gz"), &blobs)?;
    let config = keep_json(&config(dist, &content)?, &top, &blobs)?;
    let manifest = manifest(&config, &layer);
    let manifest = keep_json(&manifest, &top, &blobs)?;
    let index = index(manifest, dist.version);
    write(&oci.join("index.json"), index.to_string())?;
    write(&oci.join("oci-layout"), json!({"imageLayoutVersion": "1.0.0"}).to_string())?;
    let file = dist.out.join(format!("blockhaul-{}-{}.oci.tar", dist.version, arch()));
    run::quiet(dist.tar(&file, &oci).args(["oci-layout", "index.json", "blobs"]))?;
    Ok(PackageOutput::Files(vec![file]))
}

/// The image's root file system.
fn lay_out(program: &Path, root: &Path) -> TaskResult {
    files::install(program, &root.join("usr/bin/blockhaul"), 0o755)?;
    for name in files::NAMES {
        let link = root.join("usr/bin").join(name);
        symlink("blockhaul", &link)
            .map_err(|error| format!("cannot make {}: {error}", link.display()))?;
    }
    write(&root.join("etc/passwd"), format!("blockhaul:x:{USER}:{USER}::/data:/sbin/nologin\n"))?;
    write(&root.join("etc/group"), format!("blockhaul:x:{USER}:\n"))?;
    let read = |name: &str| {
        fs::read_to_string(run::workspace().join(name))
            .map_err(|error| format!("cannot read {name}: {error}"))
    };
    let doc = root.join("usr/share/doc/blockhaul");
    let own = licenses::own(&read("LICENSE-MIT")?, &read("LICENSE-APACHE")?, false);
    write(&doc.join("LICENSE"), own)?;
    write(&doc.join("third-party"), licenses::third_party(Flavour::Static)?)?;
    write(&doc.join("STATIC"), files::STATIC)?;
    // Sockets and temporary files; disks are mounted on /data.
    for (name, mode) in [("tmp", 0o1777), ("data", 0o755)] {
        let dir = root.join(name);
        fs::create_dir_all(&dir)
            .and_then(|()| fs::set_permissions(&dir, fs::Permissions::from_mode(mode)))
            .map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
    }
    Ok(())
}

/// A blob: its digest and its size in bytes.
struct Blob {
    digest: String,
    size: u64,
}

/// Moves a file to the blobs, under its digest.
fn keep(file: &Path, blobs: &Path) -> Result<Blob, String> {
    let sum = sums::of(file)?;
    let size = size_of(file)?;
    fs::rename(file, blobs.join(&sum))
        .map_err(|error| format!("cannot move {}: {error}", file.display()))?;
    Ok(Blob { digest: format!("sha256:{sum}"), size })
}

fn keep_json(value: &Value, top: &Path, blobs: &Path) -> Result<Blob, String> {
    let file: PathBuf = top.join("blob.json");
    write(&file, value.to_string())?;
    keep(&file, blobs)
}

fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn config(dist: &DistRun, content: &str) -> Result<Value, String> {
    let date = run::quiet(
        dist.command("date")
            .args(["-u", "+%Y-%m-%dT%H:%M:%SZ", "-d"])
            .arg(format!("@{}", dist.epoch)),
    )?;
    let date = date.trim();
    Ok(json!({
        "created": date,
        "architecture": arch(),
        "os": "linux",
        "config": {
            "User": format!("{USER}:{USER}"),
            "ExposedPorts": {"10809/tcp": {}},
            "Env": ["PATH=/usr/bin"],
            "Entrypoint": ["/usr/bin/blockhaul"],
            "Cmd": ["--help"],
            "WorkingDir": "/data",
            "Labels": {
                "org.opencontainers.image.title": "blockhaul",
                "org.opencontainers.image.version": dist.version,
                "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{content}")]},
        "history": [{"created": date, "created_by": "cargo xtask dist image"}],
    }))
}

fn manifest(config: &Blob, layer: &Blob) -> Value {
    json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": config.digest,
            "size": config.size,
        },
        "layers": [{
            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
            "digest": layer.digest,
            "size": layer.size,
        }],
    })
}

fn index(manifest: Blob, version: &str) -> Value {
    json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": manifest.digest,
            "size": manifest.size,
            "platform": {"architecture": arch(), "os": "linux"},
            // podman load makes it the name of the image.
            "annotations": {"org.opencontainers.image.ref.name": format!("blockhaul:{version}")},
        }],
    })
}
