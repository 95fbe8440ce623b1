#pragma once
// A folder with a finished study of known answers (fake_study.h), and its report.
#include <gtest/gtest.h>
#include <unistd.h>

#include "fake_study.h"
#include "report/analysis.h"
#include "report/answer.h"
#include "report/report.h"

namespace assay::report {

class ReportFolder : public testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() / fmt::format("assay-report-{}", ::getpid());
    fs::remove_all(folder);
  }
  void TearDown() override { fs::remove_all(folder); }

  std::string html() { return read_file(write_report(folder).page); }
  static const Architecture& architecture(const Study& study, const std::string& name) {
    for (const Architecture& a : study.settings[0].architectures)
      if (a.name == name) return a;
    throw std::runtime_error("no architecture " + name);
  }
  std::string facts(const Study& study, const std::string& name) {
    return join(sentences(architecture(study, name), study.settings[0]), "\n");
  }
  static bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }
  // The first screen of the page, before the evidence.
  static std::string top(const std::string& page) { return page.substr(0, page.find("<nav")); }

  fs::path folder;
  FakeStudyFolder fake;
};

}  // namespace assay::report
