//! Compiles the emulator library, once for all that ask for the same.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use xxhash_rust::xxh3::Xxh3;

use super::CudaError;

/// A planted fault: the first occurrence of a text in a source file is replaced.
#[derive(Clone, Copy, Debug)]
pub struct Mutation {
    /// Such as `decode.cu`.
    pub file: &'static str,
    pub from: &'static str,
    pub to: &'static str,
}

/// What to compile.
#[derive(Clone, Debug)]
pub struct Build<'a> {
    /// The folder with the `.cu` files.
    pub sources: &'a Path,
    /// Where libraries are kept.
    pub cache: &'a Path,
    /// Accesses beyond an allocation end the process. The process needs the sanitizer's runtime preloaded.
    pub address_sanitizer: bool,
    pub mutation: Option<Mutation>,
    /// The files whose kernels are wanted, such as `norm.cu`; empty for all.
    pub files: &'a [&'a str],
}

impl Build<'_> {
    /// The library's path. Compiles (10 seconds) unless one of the same sources is there; processes that ask for the same
    /// at once wait for each other.
    ///
    /// Errors: no g++, sources that do not compile, a mutation whose text is not there.
    pub fn library(&self) -> Result<PathBuf, CudaError> {
        let failed = |error: io::Error| self.failed(error.to_string());
        fs::create_dir_all(self.cache).map_err(failed)?;
        let sources = self.read_sources()?;
        let mut hash = Xxh3::new();
        sources.iter().for_each(|(name, text)| {
            hash.update(name.as_bytes());
            hash.update(text.as_bytes());
        });
        self.files.iter().for_each(|file| hash.update(file.as_bytes()));
        let kind = if self.address_sanitizer { "asan" } else { "plain" };
        let name = format!("cuda-emulator-{kind}-{:016x}", hash.digest());
        let library = self.cache.join(format!("{name}.so"));
        let lock = File::create(self.cache.join(format!("{name}.lock"))).map_err(failed)?;
        // SAFETY: the descriptor is open; the lock goes with it.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } != 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        if !library.is_file() {
            self.compile(&sources, &self.cache.join(&name), &library)?;
        }
        Ok(library)
    }

    /// File names, relative to the sources, and texts, with the mutation.
    fn read_sources(&self) -> Result<Vec<(String, String)>, CudaError> {
        let failed = |error: io::Error| self.failed(error.to_string());
        let mut sources = Vec::new();
        for folder in ["", "emu"] {
            for entry in fs::read_dir(self.sources.join(folder)).map_err(failed)? {
                let path = entry.map_err(failed)?.path();
                if path.is_file() {
                    let name = path.strip_prefix(self.sources).expect("it is inside. This is a bug.");
                    sources.push((
                        name.to_string_lossy().into_owned(),
                        fs::read_to_string(&path).map_err(failed)?,
                    ));
                }
            }
        }
        sources.sort();
        if let Some(Mutation { file, from, to }) = self.mutation {
            let found = sources.iter_mut().find(|(name, text)| name == file && text.contains(from));
            let (_, text) = found.ok_or_else(|| self.failed(format!("{from:?} is not in {file}")))?;
            *text = text.replacen(from, to, 1);
        }
        Ok(sources)
    }

    fn compile(&self, sources: &[(String, String)], folder: &Path, library: &Path) -> Result<(), CudaError> {
        let failed = |error: io::Error| self.failed(error.to_string());
        fs::create_dir_all(folder.join("emu")).map_err(failed)?;
        for (name, text) in sources {
            fs::write(folder.join(name), text).map_err(failed)?;
        }
        if !self.files.is_empty() {
            let includes: String = self.files.iter().map(|file| format!("#include \"{file}\"\n")).collect();
            fs::write(folder.join("all.cu"), includes).map_err(failed)?;
        }
        let partial = library.with_extension("partial");
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-g1", "-fPIC", "-shared", "-w", "-x", "c++"]);
        match (self.address_sanitizer, self.mutation) {
            (true, _) => command.args(["-O1", "-fsanitize=address", "-fno-omit-frame-pointer"]),
            // Compiled for a few launches.
            (false, Some(_)) => command.arg("-O1"),
            (false, None) => command.arg("-O2"),
        };
        command.arg("-include").arg(folder.join("emu/cuda.h"));
        command.arg(folder.join("all.cu")).arg(folder.join("emu/machine.cpp")).arg("-o").arg(&partial);
        let output = command.output().map_err(|error| self.failed(format!("g++ does not start: {error}")))?;
        fs::remove_dir_all(folder).map_err(failed)?;
        match output.status.success() {
            true => fs::rename(&partial, library).map_err(failed),
            false => Err(self.failed(String::from_utf8_lossy(&output.stderr).into_owned())),
        }
    }

    fn failed(&self, reason: String) -> CudaError {
        CudaError::Emulator { path: self.sources.display().to_string(), reason }
    }
}
