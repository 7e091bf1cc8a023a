//! Fuzz targets: what the program reads besides devices. Each takes any bytes and must not panic.

use blockhaul_control::ControlRequest;

use crate::jobfile;

/// Job files of `copy` and of `pull`.
pub fn job_file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    // Errors name the place.
    if let Err(failure) = jobfile::parse("f.toml", text, &[]) {
        assert!(!failure.to_string().is_empty());
    }
    let _ = jobfile::parse_pull("f.toml", text);
}

/// Requests on the control socket.
pub fn control_request(data: &[u8]) {
    match ControlRequest::parse(data) {
        Ok(request) => {
            let line = serde_json::to_vec(&request).expect("a request is an object");
            assert_eq!(ControlRequest::parse(&line), Ok(request));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use blockhaul_testkit::mutate::mutated;
    use blockhaul_testkit::rng::{Rng, seed};

    use super::*;

    /// Changes valid inputs. `BLOCKHAUL_SEED` repeats a failure.
    fn survives(target: fn(&[u8]), inputs: &[&str]) {
        let seed = seed();
        println!("BLOCKHAUL_SEED={seed}");
        let mut rng = Rng::new(seed);
        for input in inputs {
            target(input.as_bytes());
            for _ in 0..200 {
                target(&mutated(&mut rng, input.as_bytes()));
            }
        }
    }

    #[test]
    fn job_files_are_read_or_refused() {
        let copy = "parallel = 3\nrate = '5M'\n[defaults]\nverify = true\n[[disk]]\nname = 'root'\n\
            source = 'nbd://old/root'\ntarget = 'root.raw'\nrequest-size = '64k'\n[[disk]]\n\
            source = ['qemu-nbd', '-r', '[x']\ntarget = 'data.raw'\nsource-layer = ['log']\n";
        let pull = "[[disk]]\nname = 'vda'\nsource = 'nbd://live/vda'\nstore = 'vm1-vda'\n\
            bitmap = 'b0'\nverify = true\n";
        assert!(jobfile::parse("f.toml", copy, &[]).is_ok());
        assert!(jobfile::parse_pull("f.toml", pull).is_ok());
        survives(job_file, &[copy, pull]);
    }

    #[test]
    fn requests_on_the_control_socket_are_read_or_refused() {
        let backup = "{\"command\": \"backup\", \"export\": \"a\", \"target\": [\"qemu-nbd\", \"a\"], \"seconds\": 1.5, \"snapshot\": \
            {\"block\": 65536, \"max\": 1048576, \"directory\": \"/tmp\", \"guest_timeout\": 30, \
            \"on_failure\": \"fail\"}}";
        let mirror = "{\"command\": \"mirror\", \"export\": \"a\", \"target\": \"nbd://host/a\", \"copy_mode\": \"background\", \
            \"on_target_error\": \"stop\", \"finalize_by_hand\": true}";
        for line in [backup, mirror] {
            assert!(ControlRequest::parse(line.as_bytes()).is_ok(), "{line}");
        }
        survives(control_request, &[backup, mirror]);
    }
}
