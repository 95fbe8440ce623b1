# Writes base/commit.h when the commit has changed; run at every build. An sdist may lie in a checkout of something else.
if(EXISTS ${SOURCE}/.git)
  execute_process(COMMAND git describe --always --dirty=+ --abbrev=12 --exclude=* WORKING_DIRECTORY ${SOURCE}
                  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT commit)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define ASSAY_COMMIT \"${commit}\"\n#define ASSAY_VERSION \"${VERSION}\"\n")
