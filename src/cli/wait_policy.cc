// Makes OpenMP's waiting threads sleep instead of spin, unless the user chooses otherwise.
//
// libgomp's threads spin while they wait. When other processes use the cores, a spinning thread
// takes the time of the thread that it waits for, and training falls to about a hundredth of its
// speed. libgomp reads its environment in its constructor, so a variable that main() sets has no
// effect. Therefore the program starts itself again with OMP_WAIT_POLICY=passive. It does so from
// .preinit_array, before any library has started threads. Child processes inherit the variable
// and start once.
#include <unistd.h>

#include <cstring>

namespace {

bool starts_with(const char* text, const char* prefix) {
  return std::strncmp(text, prefix, std::strlen(prefix)) == 0;
}

bool user_chose(const char* variable) {
  return starts_with(variable, "OMP_WAIT_POLICY=") || starts_with(variable, "GOMP_SPINCOUNT=");
}

// Runs before the constructors of all libraries: it uses system calls and no allocation.
void choose_wait_policy(int /*argc*/, char** argv, char** environment) {
  size_t size = 0;
  for (; environment[size]; ++size)
    if (user_chose(environment[size])) return;
  char program[4096];
  const ssize_t length = ::readlink("/proc/self/exe", program, sizeof program - 1);
  if (length <= 0) return;
  program[length] = '\0';
  static char policy[] = "OMP_WAIT_POLICY=passive";
  char** extended = static_cast<char**>(__builtin_alloca((size + 2) * sizeof(char*)));
  std::memcpy(extended, environment, size * sizeof(char*));
  extended[size] = policy;
  extended[size + 1] = nullptr;
  ::execve(program, argv, extended);  // returns only on failure; then the threads spin
}

[[gnu::section(".preinit_array"),
  gnu::used]] void (*const before_libraries)(int, char**, char**) = choose_wait_policy;

}  // namespace
