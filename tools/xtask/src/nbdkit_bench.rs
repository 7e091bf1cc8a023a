//! A copy of nbdkit's tests that runs with either nbdkit: what nbdkit's `configure` and makefiles
//! would have made, as far as shell tests use it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::suite::{self, at, read, write_script};
use crate::{TaskResult, run};

/// The layout of a bench; a change makes all be prepared anew.
const LAYOUT: u32 = 3;

/// Directories of the source package that tests use.
const FOLDERS: &[&str] = &["tests", "plugins", "filters", "include", "common", "docs", "fuzzing"];
/// The tests' own plugins, and the sources of each.
const PLUGINS: &[&str] = &["stdio", "flush", "disconnect", "shutdown", "layers", "read-password"];
/// Directories of headers that nbdkit's sources name.
const INCLUDES: &[&str] =
    &["include", "common/include", "common/utils", "common/replacements", "plugins/vddk"];
/// The results of `configure` on Linux, as far as those sources use them.
const CONFIG: &str = "\
#define PACKAGE_NAME \"nbdkit\"
#define PACKAGE_VERSION \"1.42.3\"
#define PACKAGE_STRING \"nbdkit 1.42.3\"
#define SOEXT \"so\"
#define VDDK_LIBDIR \"/usr/lib/vmware-vix-disklib\"
#define HAVE_ACCEPT4 1
#define HAVE_ENVIRON_DECL 1
#define HAVE_ENDIAN_H 1
#define HAVE_BYTESWAP_H 1
#define HAVE_FDATASYNC 1
#define HAVE_MKOSTEMP 1
#define HAVE_OPEN_MEMSTREAM 1
#define HAVE_PIPE2 1
#define HAVE_PPOLL 1
#define HAVE_SYS_PRCTL_H 1
#define HAVE_VFORK 1
#define HAVE_VASPRINTF 1
#define HAVE_ASPRINTF 1
#define HAVE_STRNDUP 1
#define HAVE_GETLINE 1
#define HAVE_POSIX_FADVISE 1
#define HAVE_ATTRIBUTE_CLEANUP 1
";

/// The tests with one nbdkit.
pub struct NbdkitTests {
    dir: PathBuf,
    /// The directory of the peers.
    peers: PathBuf,
    /// Where the tests' output goes.
    pub log: PathBuf,
    /// The directory of plugins that blockhaul uses in place of the installed one.
    plugins: Option<PathBuf>,
}

impl NbdkitTests {
    /// Copies the tests and makes what they need. `program`: replaces nbdkit.
    pub fn prepare(
        base: &Path,
        name: &str,
        peers: &Path,
        source: &Path,
        program: Option<&Path>,
    ) -> Result<NbdkitTests, String> {
        let dir = base.join(name);
        let log = dir.join("log");
        let bench = NbdkitTests { dir, peers: peers.to_path_buf(), log, plugins: None };
        // The stamp is written last: an interrupted run is repeated.
        let stamp = bench.dir.join("stamp");
        if read(&stamp).is_ok_and(|text| text == stamp_text(program)) {
            return Ok(bench);
        }
        match fs::remove_dir_all(&bench.dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(at("remove", &bench.dir, &error));
            }
            _ => {}
        }
        let tests = bench.dir.join("tests");
        for path in [&bench.log, &bench.dir.join("bin"), &bench.dir.join("real")] {
            fs::create_dir_all(path).map_err(|error| at("make", path, &error))?;
        }
        for folder in FOLDERS {
            run::quiet(Command::new("cp").arg("-R").arg(source.join(folder)).arg(&bench.dir))?;
        }
        fs::create_dir_all(tests.join(".libs")).map_err(|error| at("make", &tests, &error))?;
        bench.program(program)?;
        bench.configure()?;
        bench.compile()?;
        bench.data()?;
        fs::write(&stamp, stamp_text(program)).map_err(|error| at("write", &stamp, &error))?;
        Ok(bench)
    }

    /// Hides one of nbdkit's plugins from blockhaul, which then uses its own device in its place.
    pub fn without_plugin(mut self, name: &str) -> Result<NbdkitTests, String> {
        let folder = self.dir.join("without").join(name);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(at("remove", &folder, &error));
            }
            _ => {}
        }
        let plugins = folder.join("plugins");
        fs::create_dir_all(&plugins).map_err(|error| at("make", &plugins, &error))?;
        // As seen inside.
        let installed =
            PathBuf::from(format!("/usr/lib/{}-linux-gnu/nbdkit", std::env::consts::ARCH));
        let link = |from: &Path, to: &Path| {
            std::os::unix::fs::symlink(from, to).map_err(|error| at("make", to, &error))
        };
        link(&installed.join("filters"), &folder.join("filters"))?;
        let outside =
            self.peers.join("root").join(installed.strip_prefix("/").unwrap_or(&installed));
        let outside = outside.join("plugins");
        let entries = fs::read_dir(&outside).map_err(|error| at("read", &outside, &error))?;
        let hidden = format!("nbdkit-{name}-plugin");
        let mut found = false;
        for entry in entries {
            let file = entry.map_err(|error| at("read", &outside, &error))?.file_name();
            if Path::new(&file).file_stem().is_some_and(|stem| *stem == *hidden) {
                found = true;
            } else {
                link(&installed.join("plugins").join(&file), &plugins.join(&file))?;
            }
        }
        if !found {
            return Err(format!("there is no {hidden} in {}", outside.display()));
        }
        self.plugins = Some(plugins);
        Ok(self)
    }

    /// Puts `nbdkit` first in the search path: a script that passes plugins which are not installed
    /// by their paths.
    fn program(&self, program: Option<&Path>) -> TaskResult {
        let real = match program {
            None => "/usr/bin/nbdkit".to_string(),
            Some(program) => {
                let link = self.dir.join("real/nbdkit");
                std::os::unix::fs::symlink(program, &link)
                    .map_err(|error| at("make", &link, &error))?;
                link.display().to_string()
            }
        };
        let vddk = self.dir.join("plugins/vddk/.libs/nbdkit-vddk-plugin.so");
        let text = format!(
            "#!/bin/bash\nwords=()\nfor word; do\n  case \"$word\" in\n    \
             vddk) words+=('{}') ;;\n    *) words+=(\"$word\") ;;\n  esac\ndone\n\
             exec -a nbdkit '{real}' \"${{words[@]}}\"\n",
            vddk.display()
        );
        // Scripts look for it where it would have been built, too.
        let server = self.dir.join("server");
        fs::create_dir_all(&server).map_err(|error| at("make", &server, &error))?;
        for place in ["bin/nbdkit", "server/nbdkit", "nbdkit"] {
            write_script(&self.dir.join(place), &text)?;
        }
        Ok(())
    }

    /// Fills in templates, and makes plugins and filters look as if they had been built here.
    fn configure(&self) -> TaskResult {
        let tests = self.dir.join("tests");
        let all: Vec<String> = ["plugins", "filters"]
            .iter()
            .map(|kind| Ok(installed(&self.peers.join("root/usr/lib"), kind)?.join(" ")))
            .collect::<Result<_, String>>()?;
        for name in ["functions.sh", "make-pki.sh", "make-psk.sh"] {
            let template = tests.join(format!("{name}.in"));
            // Not each version has all of them.
            if !template.is_file() {
                continue;
            }
            let template = read(&template)?;
            let text = filled(&template, &self.dir, &all[0], &all[1]);
            write_script(&tests.join(name), &text)?;
        }
        for (kind, names) in ["plugins", "filters"].iter().zip(&all) {
            let what = kind.trim_end_matches('s');
            for name in names.split(' ') {
                let libs = self.dir.join(kind).join(name).join(".libs");
                fs::create_dir_all(&libs).map_err(|error| at("make", &libs, &error))?;
                let mark = libs.join(format!("nbdkit-{name}-{what}.so"));
                // As seen inside, where they are installed; scripts of that kind have another name.
                let arch = std::env::consts::ARCH;
                let path = format!("lib/{arch}-linux-gnu/nbdkit/{kind}/nbdkit-{name}-{what}.so");
                if !self.peers.join("root/usr").join(&path).exists() {
                    write_script(&mark, "")?;
                    continue;
                }
                std::os::unix::fs::symlink(format!("/usr/{path}"), &mark)
                    .map_err(|error| at("make", &mark, &error))?;
            }
        }
        let config = self.dir.join("include/config.h");
        fs::write(&config, CONFIG).map_err(|error| at("write", &config, &error))?;
        let version = self.dir.join("include/nbdkit-version.h");
        let text = "#define NBDKIT_VERSION_MAJOR 1\n#define NBDKIT_VERSION_MINOR 42\n\
                    #define NBDKIT_VERSION_MICRO 3\n#define NBDKIT_VERSION_STRING \"1.42.3\"\n";
        fs::write(&version, text).map_err(|error| at("write", &version, &error))
    }

    /// Compiles what tests load.
    fn compile(&self) -> TaskResult {
        for name in PLUGINS {
            let sources = [format!("tests/test-{name}-plugin.c")];
            self.shared(&format!("tests/.libs/test-{name}-plugin.so"), &sources, &[])?;
        }
        self.shared(
            "tests/.libs/test-ansi-c-plugin.so",
            &["tests/test-ansi-c-plugin.c".into()],
            &["-std=c90", "-pedantic"],
        )?;
        for index in 1..=3 {
            let layer = format!("-Dlayer=\"filter{index}\"");
            let path = format!("tests/.libs/test-layers-filter{index}.so");
            self.shared(&path, &["tests/test-layers-filter.c".into()], &[&layer])?;
        }
        for what in ["plugin", "filter"] {
            let path = format!("tests/.libs/test-cxx-{what}.so");
            self.shared(&path, &[format!("tests/test-cxx-{what}.cpp")], &[])?;
        }
        self.shared(
            "tests/.libs/libvixDiskLib.so.6",
            &["tests/dummy-vddk.c".into()],
            &["-Wl,-soname,libvixDiskLib.so.6"],
        )?;
        let libs = self.dir.join("plugins/vddk/.libs");
        fs::create_dir_all(&libs).map_err(|error| at("make", &libs, &error))?;
        let mut sources: Vec<String> = ["reexec", "stats", "utils", "vddk", "worker"]
            .iter()
            .map(|name| format!("plugins/vddk/{name}.c"))
            .collect();
        let utils = ["cleanup", "cleanup-nbdkit", "vector", "string-vector", "quote", "utils"];
        let utils = utils.iter().map(|name| format!("common/utils/{name}.c"));
        sources.extend(utils.filter(|path| self.dir.join(path).is_file()));
        self.shared("plugins/vddk/.libs/nbdkit-vddk-plugin.so", &sources, &[])
    }

    fn shared(&self, out: &str, sources: &[String], flags: &[&str]) -> TaskResult {
        let compiler =
            if sources.iter().any(|path| path.ends_with(".cpp")) { "g++" } else { "gcc" };
        let mut command = Command::new(compiler);
        command.current_dir(&self.dir).args(["-shared", "-fPIC", "-O1", "-g", "-w", "-pthread"]);
        command.args(["-D_GNU_SOURCE", "-DHAVE_CONFIG_H"]).args(flags);
        command.args(INCLUDES.iter().map(|folder| format!("-I{folder}")));
        command.args(sources).args(["-ldl", "-o", out]);
        run::quiet(&mut command).map(drop)
    }

    /// Keys, certificates and disks, made as nbdkit's makefile makes them.
    fn data(&self) -> TaskResult {
        let script = "set -e\n\
            SRCDIR=. ./make-psk.sh keys.psk\n./make-pki.sh pki\n\
            ./generate-file-data.sh file-data\n\
            dd if=file-data of=split1 bs=1 count=100\n\
            dd if=file-data of=split2 bs=1 count=100 skip=100\n\
            dd if=file-data of=split3 bs=1 skip=200\n\
            mkdir disk.d\necho -n hello,world > disk.d/hello.txt\n\
            /usr/bin/nbdkit linuxdisk disk.d size=100M --run 'qemu-img convert \"$uri\" disk'\n\
            rm -r disk.d\n\
            printf '#!../nbdkit python\\r\\n' > shebang-crlf.py\nchmod +x shebang-crlf.py\n\
            tar cf disk.tar disk\n\
            gzip -9 --keep disk disk.tar\n\
            xz --best --block-size=32768 --keep disk disk.tar\n\
            mkdir -p ext2.d/disks\ncp disk ext2.d/disks/disk.img\n\
            echo /disks/disk.img > ext2.d/manifest\ntruncate -s 2147483648 ext2.img\n\
            mke2fs -q -F -t ext4 -d ext2.d ext2.img 2147483648\nrm -r ext2.d\n";
        run::quiet(&mut self.command("bash", &["-c", script])).map(drop)
    }

    /// A command in the directory of the tests, among the peers, with `bin` first in its search
    /// path.
    pub fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(self.peers.join("enter"));
        // Inside, as entering puts the peers first.
        let script = "PATH=\"$0:$PATH\" exec \"$@\"";
        command.args(["sh", "-c", script]).arg(self.dir.join("bin")).arg(program).args(args);
        let tests = self.dir.join("tests");
        command.current_dir(&tests).env("LIBNBD_DEBUG", "1").env("srcdir", ".");
        command.env("abs_builddir", &tests).env("abs_srcdir", &tests).env("builddir", ".");
        // Where the vddk plugin is not installed, its tests find it by this script of ours.
        command.env_remove("PYTHONUNBUFFERED").env_remove("LD_LIBRARY_PATH");
        match &self.plugins {
            Some(folder) => command.env("BLOCKHAUL_PLUGIN_PATH", folder),
            None => command.env_remove("BLOCKHAUL_PLUGIN_PATH"),
        };
        command
    }
}

/// Describes the inputs of a bench.
fn stamp_text(program: Option<&Path>) -> String {
    let what = program.map_or("original".into(), |program| program.display().to_string());
    format!("{what}, layout {LAYOUT}\n")
}

/// Names of plugins or filters in the peers' directory, and of those that are compiled here.
fn installed(lib: &Path, kind: &str) -> Result<Vec<String>, String> {
    let folder = lib.join(format!("{}-linux-gnu/nbdkit", std::env::consts::ARCH)).join(kind);
    let entries = fs::read_dir(&folder).map_err(|error| at("read", &folder, &error))?;
    let what = kind.trim_end_matches('s');
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let name = name.strip_prefix("nbdkit-")?.trim_end_matches(".so");
            Some(name.strip_suffix(&format!("-{what}"))?.to_owned())
        })
        .collect();
    names.sort();
    Ok(names)
}

/// The value of `@NAME@` in `configure`: lists and directories, the plain names of programs, and
/// nothing for missing ones.
fn filled(template: &str, top: &Path, plugins: &str, filters: &str) -> String {
    suite::filled(template, |name| match name {
        "abs_top_srcdir" | "top_builddir" => top.display().to_string(),
        "plugins" => plugins.to_owned(),
        "filters" => filters.to_owned(),
        "PYTHON" => "python3".to_owned(),
        "SOEXT" => "so".to_owned(),
        "CXX" => "g++".to_owned(),
        "CUT" | "SED" | "STAT" | "TRUNCATE" | "CERTTOOL" => name.to_ascii_lowercase(),
        _ => String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_plugin_is_hidden() {
        let dir = tempfile::tempdir().unwrap();
        let installed = format!("usr/lib/{}-linux-gnu/nbdkit/plugins", std::env::consts::ARCH);
        let installed = dir.path().join("root").join(installed);
        fs::create_dir_all(&installed).unwrap();
        for name in ["a", "b"] {
            fs::write(installed.join(format!("nbdkit-{name}-plugin.so")), "").unwrap();
        }
        let bench = || NbdkitTests {
            dir: dir.path().join("bench"),
            peers: dir.path().into(),
            log: dir.path().join("log"),
            plugins: None,
        };
        let folder = bench().without_plugin("a").unwrap().plugins.unwrap();
        let left = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), ["nbdkit-b-plugin.so"]);
        assert!(bench().without_plugin("c").is_err_and(|error| error.contains("nbdkit-c-plugin")));
    }

    #[test]
    fn templates_are_filled_in() {
        let template = "for p in @plugins@; do \"$@\"; done\nSED=\"@SED@\" CXX=\"@CXX@\" a@b\n";
        let text = filled(template, Path::new("/t"), "a b", "c");
        assert_eq!(text, "for p in a b; do \"$@\"; done\nSED=\"sed\" CXX=\"g++\" a@b\n");
    }

    #[test]
    fn plugins_are_found_by_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let folder =
            dir.path().join(format!("{}-linux-gnu/nbdkit/plugins", std::env::consts::ARCH));
        fs::create_dir_all(&folder).unwrap();
        for name in ["nbdkit-b-plugin.so", "nbdkit-a-c-plugin", "other.so", "nbdkit-x-filter.so"] {
            fs::write(folder.join(name), "").unwrap();
        }
        assert_eq!(installed(dir.path(), "plugins").unwrap(), ["a-c", "b"]);
    }
}
